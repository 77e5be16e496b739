"""What a signal says of the run that it is made of."""

import pytest

from rlx import signal
from rlx.distillation.provenance import converged


def test_how_a_run_ended_is_not_known_of_few_updates():
    assert converged([0.0] * 8) is None
    assert converged([0.0] * 9) is True
    assert converged([0.0, 0.1, 0.0, 0.1, 0.0, 0.1, 0.9, 1.0, 0.9]) is False


@pytest.mark.parametrize("content, said", [('{"updates": 3', "is damaged, it is not JSON"), ("{}", "no 'updates'")])
def test_a_damaged_summary_is_named(tmp_path, content, said):
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(ValueError, match=rf"summary\.json .*{said}"):
        signal.main(["create", f"--run={tmp_path}", f"--to={tmp_path / 'signal'}"])
