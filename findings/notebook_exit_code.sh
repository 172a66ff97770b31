#!/usr/bin/env bash
# nbconvert 7.17.2, jupytext 1.19.6, papermill 2.7.0; nbclient 0.11.0, ipython 9.18.1, ipykernel
# 7.4.0: a notebook whose training fails is executed with exit code 0 if `%run train.py` starts it:
# IPython prints the exception, and the cell counts as done; nbclient asks only for the cell's
# status, and goes on with the next cells (an upload, an evaluation of the old model). papermill
# finds the error in the output and fails, but only after the next cells. With a cell `exit(1)`, all
# of them end with 0: IPython's exit takes the 1 for "keep the kernel". So what starts a run again
# after a failure takes this one for finished. `sys.exit(1)` and an exception in a cell itself are
# told; so importing the script helps, or `%%bash`.
# Seen: as in the table below; "next" is a following cell that ran all the same.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet nbconvert==7.17.2 \
    nbclient==0.11.0 jupytext==1.19.6 papermill==2.7.0 ipykernel==7.4.0 ipython==9.18.1
cd "$folder"
export IPYTHONDIR=$folder/ipython JUPYTER_DATA_DIR=$folder/jupyter JUPYTER_CONFIG_DIR=$folder/config
export PATH=$folder/venv/bin:$PATH
echo 'raise RuntimeError("CUDA error")' >train.py
python - <<'PY'
import nbformat

kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
for name, source in {
    "run": "%run train.py",
    "exit": "exit(1)",
    "bash": "%%bash\npython train.py",
    "sys": "import sys\nsys.exit(1)",
    "import": "import train",
}.items():
    cells = [nbformat.v4.new_code_cell(text) for text in (source, "open('next', 'w').close()")]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, f"{name}.ipynb")
PY
for name in run exit bash sys import; do
    for tool in nbconvert jupytext papermill; do
        rm -f next
        case $tool in
        nbconvert) command=(jupyter nbconvert --to notebook --execute "$name.ipynb" --output out) ;;
        jupytext) command=(jupytext --execute --to notebook --output out.ipynb "$name.ipynb") ;;
        papermill) command=(papermill "$name.ipynb" out.ipynb) ;;
        esac
        code=0
        "${command[@]}" >log 2>&1 || code=$?
        echo "$name $tool $code$([ ! -e next ] || echo ' next')"
    done
done | tee seen
diff seen - <<'SEEN'
run nbconvert 0 next
run jupytext 0 next
run papermill 1 next
exit nbconvert 0 next
exit jupytext 0 next
exit papermill 0 next
bash nbconvert 1
bash jupytext 1
bash papermill 1
sys nbconvert 1
sys jupytext 1
sys papermill 1
import nbconvert 1
import jupytext 1
import papermill 1
SEEN
