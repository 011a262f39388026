"""Redaction: whatever is planted in whatever field, nothing of it gets out."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mpipar.comm.call import Call, Op, ReduceOp
from mpipar.errors import InvalidPublicReport
from mpipar.report import PUBLIC_FIELDS, redacted

# Every secret carries a mark that no word of the vocabulary holds.
SECRETS = st.builds(
    lambda form, mark: form.format(mark, mark[2:4]),
    st.sampled_from(
        [
            "{0}",
            "node-{0}.cluster.example.org",
            "/home/{0}/run/ckpt.npz",
            "C:\\Users\\{0}\\data",
            "{0}@login7",
            "10.17.{1}.4:{0}",
            "fe80::{1}%{0}",
            "GPU-{1}aaaaaa-bbbb-4ccc-8ddd-{0}",
            "slurm job 48{1} of {0}",
            "SLURM_JOB_ID={0}",
            "all_reduce {0}",
            "all_reduce\n{0}",
            "all_reduce{0}",
        ]
    ),
    st.integers(1000, 9999).map("zq{}".format),
)
STRANGERS = ["host", "user", "path", "device", "job_id", "env", "note", "error", "pp", ""]
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from([*Op, *ReduceOp, "all-reduce", "float32", "dp", "public", "data-parallel"]),
)
NAMES = [*PUBLIC_FIELDS, *STRANGERS]
WRAPS: list[Callable[[str], Any]] = [
    lambda s: s,
    str.encode,
    lambda s: [s],
    lambda s: (0, s),
    lambda s: {s: 0},
    lambda s: {s: s, "dp": s},
    lambda s: dict.fromkeys(NAMES, s),
    lambda s: [{**dict.fromkeys(NAMES, s), "calls": [dict.fromkeys(NAMES, s)]}],
]
# The secret stands in every field at once, so that one leaking field is enough to be caught.
EVERYWHERE = st.builds(
    lambda secret, wrap: {**dict.fromkeys(NAMES, wrap(secret)), secret: secret},
    SECRETS,
    st.sampled_from(WRAPS),
)
KEYS = st.sampled_from(NAMES) | SECRETS | st.text(max_size=4)
ITEMS = st.recursive(
    SECRETS | PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
MIXED = st.dictionaries(KEYS, ITEMS, max_size=6)
Redactor = Callable[[Mapping[str, Any]], Any]


def check_nothing_leaks(redactor: Redactor, max_examples: int) -> None:
    """Run the property against one redactor; every secret carries a mark ``zqNNNN``."""

    @settings(
        max_examples=max_examples,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(EVERYWHERE | MIXED)
    def holds(record: dict[str, Any]) -> None:
        assert "zq" not in repr(redactor(record))

    holds()


def test_no_secret_reaches_the_output_wherever_it_stands():
    check_nothing_leaks(redacted, 300)


@pytest.mark.slow
def test_no_secret_reaches_the_output_long_form():
    check_nothing_leaks(redacted, 1500)


def block_list(record: Mapping[str, Any]) -> Any:
    """Drop the fields that sound secret and keep the rest: what redaction must not be."""
    secret = {"host", "user", "path", "device", "job_id", "env"}
    return {k: v for k, v in record.items() if k not in secret}


PLANTED_FAULTS: dict[str, Redactor] = {
    "one field takes any text": lambda r: redacted(r, {**PUBLIC_FIELDS, "note": str}),
    "a word is matched by its beginning": lambda r: redacted(
        r,
        {
            **PUBLIC_FIELDS,
            "op": lambda v: v if isinstance(v, str) and v.startswith("all_reduce") else None,
        },
    ),
    "a list is not looked into": lambda r: redacted(r, {**PUBLIC_FIELDS, "shape": lambda v: v}),
    "a block-list": block_list,
}


@pytest.mark.parametrize("fault", PLANTED_FAULTS)
def test_the_property_catches_a_leak(fault):
    with pytest.raises(AssertionError, match="zq"):
        check_nothing_leaks(PLANTED_FAULTS[fault], 300)


@given(MIXED)
def test_redaction_is_pure_repeatable_and_json(record):
    before = copy.deepcopy(record)
    once = redacted(record)
    assert repr(record) == repr(before)
    assert redacted(once) == once
    assert json.loads(json.dumps(once, allow_nan=False)) == once


def test_a_full_call_record_comes_through():
    call = {
        "op": "all_reduce",
        "kind": "all-reduce",
        "reduce_op": "sum",
        "dtype": "float32",
        "axis": "dp",
        "axes": ["dp", "cp"],
        "coordinate": {"pp": 0, "dp": 1},
        "sequence": 7,
        "rank": 1,
        "world_size": 4,
        "root": 0,
        "shape": [3, 2],
        "counts": [],
        "n_bytes": 24,
        "duration_s": 0.25,
        "deterministic": True,
    }
    assert redacted(call) == call
    assert redacted({"calls": [call, call]}) == {"calls": [call, call]}


def test_what_does_not_fit_is_removed_and_the_rest_stays():
    record = {
        "op": "all_reduce",
        "dtype": "float32 on node7",
        "rank": -1,
        "root": True,
        "sequence": 2**63,
        "shape": [3, "node7"],
        "duration_s": float("nan"),
        "bytes_per_s": 10**400,
        "blocking": 1,
        "coordinate": {"dp": 1, "host": "node7", "tp": "node7"},
        "axes": "dp",
        "calls": [{"host": "node7", "op": "barrier"}],
        "n_bytes": np.int64(8),
        "hostname": "node7",
    }
    clean = redacted(record)
    assert clean == {
        "op": "all_reduce",
        "coordinate": {"dp": 1},
        "calls": [{"op": "barrier"}],
        "n_bytes": 8,
    }
    assert type(clean["n_bytes"]) is int


def test_words_are_made_anew_from_the_vocabulary():
    class Loud(str):
        def __repr__(self) -> str:
            return "node7"

    class LoudNumber(int):
        def __repr__(self) -> str:
            return "node7"

    clean = redacted({"op": Loud("barrier"), "rank": LoudNumber(3), "reduce_op": ReduceOp.SUM})
    assert repr(clean) == "{'op': 'barrier', 'reduce_op': 'sum', 'rank': 3}"


def test_the_fields_of_a_call_are_known():
    call = Call(Op.ALL_REDUCE, reduce_op=ReduceOp.MEAN, root=2, shape=(4,), agreed="user alice")
    clean = redacted(call._asdict())
    assert clean == {
        "op": "all_reduce",
        "reduce_op": "mean",
        "root": 2,
        "shape": [4],
        "deterministic": False,
        "blocking": True,
    }


@pytest.mark.parametrize("record", [None, "zq1234", [("op", "barrier")]])
def test_what_is_no_record_is_refused_without_repeating_it(record):
    with pytest.raises(InvalidPublicReport, match="not a record") as caught:
        redacted(record)
    assert "zq" not in str(caught.value)
