"""Checks as lines, JSON and a public block."""

import json
import string

from hypothesis import given
from hypothesis import strategies as st

from mpipar.doctor import Check, Status, public_block, report_lines
from mpipar.doctor.check import WORDS, guarded

CHECKS = [
    Check("versions", Status.OK, "python 3.12", facts={"python": "3.12.1", "system": "linux"}),
    Check("run folder", Status.FAIL, "/home/ada cannot be written", "choose another"),
    Check("cores", Status.WARN, "3 cores", facts={"cores": 3, "host": "node17", "ok": True}),
]


def test_one_line_a_check_and_its_fix_below() -> None:
    assert report_lines(CHECKS).splitlines() == [
        "[ok]   versions    python 3.12",
        "[fail] run folder  /home/ada cannot be written",
        "                   fix: choose another",
        "[warn] cores       3 cores",
        "1 ok, 1 warn, 1 fail",
    ]


def test_json_keeps_everything() -> None:
    values = json.loads(json.dumps([check.to_json() for check in CHECKS]))
    assert [Check(**{**value, "status": Status(value["status"])}) for value in values] == CHECKS


def test_the_public_block_has_no_reason_and_no_name() -> None:
    assert public_block(CHECKS).splitlines() == [
        "```",
        "[ok] versions: python=3.12.1, system=linux",
        "[fail] run folder",
        "[warn] cores: cores=3, ok=True",
        "```",
    ]


LETTERS = string.ascii_letters + string.digits + "-_./:@ "


@given(st.lists(st.text(LETTERS, min_size=3, max_size=20).filter(str.strip), max_size=4))
def test_no_text_gets_into_the_public_block(secrets: list[str]) -> None:
    facts: dict[str, object] = {f"x{i}": secret for i, secret in enumerate(secrets)}
    facts |= {"list": secrets, "n": 1}
    block = public_block([Check("name", Status.OK, " ".join(secrets), " ".join(secrets), facts)])
    values = [item.partition("=")[2] for item in block.splitlines()[1].split(", ")]
    for value in values:
        is_number = not value.strip("0123456789.[]', ")
        assert is_number or value in WORDS, block


def test_a_check_that_breaks_is_a_finding() -> None:
    (found,) = guarded("odd", lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    assert (found.name, found.status) == ("odd", Status.WARN)
    assert "ZeroDivisionError" in found.reason
