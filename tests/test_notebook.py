"""The notebook runs from top to bottom in a kernel of its own, and what it stores is what it prints.

Store it anew with `jupyter execute --inplace --NotebookClient.record_timing=False examples/notebook.ipynb`.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples/notebook.ipynb"

SAYS = {
    "tokens equal: True": 2,
    "tokens equal after restore: True": 1,
    "tokens of all prompts equal: True": 1,
    "bytes of the cache: 2,048,000, with a budget of 512 tokens 819,200": 1,
    "parameters: 36,780,160 bytes before, 11,944,064 now": 1,
}
"""Line and how often it is printed."""


def streams(notebook):
    return "".join(
        output.text for cell in notebook.cells for output in cell.get("outputs", []) if output.output_type == "stream"
    )


def tables(notebook):
    """The HTML that cells show."""
    shown = (output for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output)
    return [output.data["text/html"] for output in shown]


def check(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"]
    printed = streams(notebook)
    assert {line: printed.splitlines().count(line) for line in SAYS} == SAYS, printed
    number = r"(\d+\.\d+)"
    stock_ms, ms = map(float, re.search(f"stock {number} ms a token, optimized {number} ms", printed).groups())
    assert stock_ms > 0 and ms > 0
    kept = float(re.search(f"experts that a token keeps of 4: {number}", printed)[1])
    assert 2 < kept < 4
    stock, fewer = map(float, re.search(f"perplexity {number}, with fewer experts {number}", printed).groups())
    again, packed = map(float, re.search(f"perplexity {number}, in four bits {number}", printed).groups())
    assert stock == again and stock < fewer < 1.05 * stock and stock < packed < 1.06 * stock
    accepted = int(re.search(r"speculative: accepted tokens: (\d+)", printed)[1])
    assert accepted > 0
    intended, report, undone = tables(notebook)
    assert intended.count("<tr>") == report.count("<tr>") == 6 and "plan for deepseek_v3" in intended
    assert "cuda_graphs" in intended and "layers: fused step: " in report
    assert undone == "<p>deepseek_v3: not optimized</p>"
    return kept, stock, fewer, packed


@pytest.mark.slow
def test_the_notebook_runs_and_stores_what_it_prints(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    stored = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(stored)
    expected = check(stored)

    fresh = nbformat.read(NOTEBOOK, as_version=4)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    with pytest.raises(AssertionError):
        check(fresh)  # the outputs checked below are those of this run
    nbclient.NotebookClient(
        fresh, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert check(fresh) == pytest.approx(expected, rel=0.02)
