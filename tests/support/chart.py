"""Writes the templates of deploy/helm from deploy/kubernetes/depot: `python -m support.chart`, in the folder `tests`.

The templates are the manifests' text. A value replaces a line, or adds lines after it.
"""

import re
from pathlib import Path
from typing import Final

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
TEMPLATES: Final = DEPLOY / "helm" / "templates"

_REPLACED: Final = {
    r"(image: )kvdepot:\S+": r"\1{{ .Values.image }}",
    r"(--pool-size=)\S+": r"\1{{ .Values.poolSize }}",
    r'(requests: {cpu: "1", memory: )\w+': r"\1{{ .Values.memory }}",
    r"(limits: {memory: )\w+": r"\1{{ .Values.memory }}",
    r"(nodeSelector:\n)(?: {8}.*\n)+": r"\1        {{- toYaml .Values.nodeSelector | nindent 8 }}\n",
    r"(tolerations:\n)(?: {8}.*\n)+": r"\1        {{- toYaml .Values.tolerations | nindent 8 }}\n",
}
_FOLLOWED: Final = {
    "args": r"args:\n(?: {12}.*\n)+",
    "volumeMounts": r"volumeMounts:\n(?: {12}.*\n)+",
    "volumes": r"volumes:\n(?: {8}.*\n)+",
}


def templates() -> dict[str, str]:
    """Return the chart's templates by file name."""
    files = {path.name: path.read_text() for path in (DEPLOY / "kubernetes" / "depot").glob("*.yaml")}
    del files["kustomization.yaml"]
    depot = files["depot.yaml"]
    for pattern, replacement in _REPLACED.items():
        depot = _replace_once(pattern, replacement, depot)
    for value, pattern in _FOLLOWED.items():
        depth = 8 if value == "volumes" else 12
        more = f"{{{{- with .Values.{value} }}}}{{{{ toYaml . | nindent {depth} }}}}{{{{ end }}}}\n"
        depot = _replace_once(pattern, rf"\g<0>{' ' * depth}{more}", depot)
    env = "          env: {{- toYaml .Values.env | nindent 12 }}\n"
    files["depot.yaml"] = _replace_once(
        r" {10}ports:\n", rf"          {{{{- if .Values.env }}}}\n{env}          {{{{- end }}}}\n\g<0>", depot
    )
    return {
        name: f"# Written from ../../kubernetes/depot by `python -m support.chart`.\n{text}"
        for name, text in files.items()
    }


def _replace_once(pattern: str, replacement: str, text: str) -> str:
    text, count = re.subn(pattern, replacement, text)
    if count != 1:
        raise AssertionError(f"{pattern!r} is {count} times in deploy/kubernetes/depot, and has to be there once")
    return text


def main() -> None:
    """Write the files."""
    for name, text in templates().items():
        (TEMPLATES / name).write_text(text)


if __name__ == "__main__":
    main()
