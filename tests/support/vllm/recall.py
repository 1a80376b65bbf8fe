"""Two tasks for reused KV: without recomputation it must fail one and pass the other.

A prompt is BOS, documents, questions. A document is DOC and pairs of a key and its value. Shared keys occur in several
documents with different values, single keys in only one document. There are two kinds of questions:

- `NTH n key`: the value of a shared key in the n-th document *of this prompt*. A token knows its document's number only
  from the context in which it was computed. KV from a prompt with another order answers for the wrong document.
- `ANY key`: the value of a single key. KV from anywhere answers it, if its rotation is right.

`benchmarks/blend/train_recall.py` trains the model in `tests/vllm_connector/assets/recall`.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

RECALL: Final = Path(__file__).parents[2] / "vllm_connector" / "assets" / "recall"

BOS, DOC, NTH, ANY, PAD = range(5)
MOST_DOCUMENTS: Final = 5
_SHARED_KEYS, _SINGLE_KEYS, _VALUES = 12, 24, 16
NUMBER: Final = 8  # token of the first document's number
_SHARED: Final = 16
_SINGLE: Final = _SHARED + _SHARED_KEYS
_VALUE: Final = _SINGLE + _SINGLE_KEYS
VOCABULARY: Final = 80

Document = list[int]


class Question(NamedTuple):
    """A question's tokens without the answer, and the answer."""

    tokens: list[int]
    answer: int


def make_documents(source: random.Random, count: int) -> list[Document]:
    """Return documents of 19 tokens: six shared keys and three single ones, in random order, each with a value."""
    singles = source.sample(range(_SINGLE, _SINGLE + _SINGLE_KEYS), 3 * count)
    documents: list[Document] = []
    for number in range(count):
        keys = source.sample(range(_SHARED, _SHARED + _SHARED_KEYS), 6) + singles[3 * number : 3 * number + 3]
        source.shuffle(keys)
        documents.append([DOC, *(token for key in keys for token in (key, _VALUE + source.randrange(_VALUES)))])
    return documents


def make_question(source: random.Random, documents: Sequence[Document], kind: int) -> Question:
    """Ask for a key of one of the documents; `kind` is NTH or ANY."""
    number = source.randrange(len(documents))
    document = documents[number]
    pairs = [pair for pair in zip(document[1::2], document[2::2], strict=True) if (pair[0] < _SINGLE) == (kind == NTH)]
    key, value = source.choice(pairs)
    return Question([NTH, NUMBER + number, key] if kind == NTH else [ANY, key], value)


def make_prompt(documents: Sequence[Document]) -> list[int]:
    """Return BOS and the documents."""
    return [BOS, *(token for document in documents for token in document)]
