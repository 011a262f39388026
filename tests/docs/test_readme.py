"""What the README shows runs as it stands."""

import re
from pathlib import Path
from typing import Any

import numpy as np

README = Path(__file__).parents[2] / "README.md"


def test_collectives():
    fragment, whole = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert "DataParallel" in fragment
    names: dict[str, Any] = {}
    exec(whole, names)
    for mean, total in names["ThreadWorld"](4).run(names["body"]):
        assert mean.dtype == total.dtype == np.float16
        assert (mean == 1.5).all()
        assert mean.shape == total.shape == (3, 6)
        assert (total == 6).all()
