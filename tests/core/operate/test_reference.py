"""The pages of docs/reference have the settings, metrics and public objects that there are."""

import re

import pytest

import kvdepot
import kvdepot.client
from kvdepot.lab.processes import DepotProcess

pytest.importorskip("prometheus_client", reason="pip install 'kvdepot[http]'")

from kvdepot.operate.metrics import render_metrics
from support import api_reference, reference


def test_the_page_is_what_the_code_declares() -> None:
    assert reference.PAGE.read_text() == reference.page(), "run `python -m support.reference` in tests/"


def test_the_page_of_objects_has_the_docstrings_of_all_public_names() -> None:
    assert api_reference.PAGE.read_text() == api_reference.page(), "run `python -m support.api_reference` in tests/"
    modules = [module for section in api_reference.OBJECTS.values() for module in section.values()]
    assert {*kvdepot.__all__, *kvdepot.client.__all__} <= {name for names in modules for name in names}


def test_the_page_has_the_metrics_of_a_depot() -> None:
    with DepotProcess("--tier", "memory://?capacity=1MiB") as depot:
        text = render_metrics(depot.status()).decode()
    exported = set(re.findall(r"^# HELP kvdepot_(\w+) ", text, re.MULTILINE))
    of_tiers = {f"tier_{name}_total" for name, _ in reference.declared(reference.TIERS, "tier_counter")}
    assert {re.findall(r"\w+", name)[0] for name, _ in reference.metrics()} == exported | of_tiers


def test_the_page_has_the_counters_of_both_engines() -> None:
    text = reference.PAGE.read_text()
    assert "\n| `hit_tokens` | Tokens that were loaded instead of computed |\n" in text
    assert "\n| `found_pages` | Pages that the depot had and the device had not |\n" in text
