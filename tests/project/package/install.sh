#!/usr/bin/env bash
# Installs wheels or sdists into a clean environment as a user does, one after the other, and tries each there.
#
#     tests/project/package/install.sh dist/*.whl      # torchrec_recstore, torchrec_recstore_service, torchrec_recstore_serving
#
# Works in a folder of its own, so that nothing of the checkout can be imported.
set -euo pipefail
artifact=$(realpath "$1") service=$(realpath "$2") serving=$(realpath "$3")
requirements=$(realpath "$(dirname "$0")/../../../requirements")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH
cd "$folder"

"${PYTHON:-python3}" -m venv venv
export PATH="$folder/venv/bin:$PATH"
# Python compiles what the commands import. To compile all modules of all packages takes a minute.
pip() { python -m pip --disable-pip-version-check --quiet "$@" --no-compile; }
extras="$artifact[cli,examples,torchrec-cpu]"
isolation=()
if [[ "$artifact" == *.whl ]]; then
    pip install "$extras"  # the extras alone choose the versions
else  # an sdist is compiled, which needs torch in this environment
    pip install -r "$requirements/build.txt" -r "$requirements/base.txt"
    isolation=(--no-build-isolation)
    pip install "${isolation[@]}" "$extras"
fi
pip install --no-deps -r "$requirements/torchrec.txt"

python - <<'PYTHON'
import importlib.metadata, pathlib, re
import torchrec_recstore

assert "venv" in torchrec_recstore.__file__, torchrec_recstore.__file__
# The README's first code; the rest of its page continues it.
readme = importlib.metadata.metadata("torchrec-recstore").get_payload()
pathlib.Path("quickstart.py").write_text(re.search(r"```python\n(.*?)```", readme, re.S)[1])
PYTHON
test "$(python -W ignore quickstart.py 2>quickstart.log | tail -1)" = 3 || { cat quickstart.log; exit 1; }
echo "quickstart: three rows"

recstore doctor
recstore train --limit-rows 4000 --epochs 1 --checkpoint run
recstore inspect run/step-*
! recstore serve --listen 127.0.0.1:0 --data tables 2>serve.log
grep "pip install path/to/torchrec_recstore/service" serve.log
! python -c "import torchrec_recstore; torchrec_recstore.RecStoreClient" 2>client.log
grep "pip install path/to/torchrec_recstore/service" client.log
pip install "${isolation[@]}" "$service"
python -c "
import torch, torchrec_recstore
client = torchrec_recstore.RecStoreClient()
client.init_data('user', (10, 4))
print('client:', tuple(client.pull('user', torch.tensor([7])).shape))"
! recstore export run/step-* tables.pt 2>export.log
grep "pip install path/to/torchrec_recstore/serving" export.log
pip install "${isolation[@]}" "$serving"
touch installed
recstore export run/step-* tables.pt --dtype fp16 --top-rows 100
recstore bench --list
changed() { (cd venv/lib && find . -newer "$folder/$1" -path "$2" ! -name '*.pyc' ! -name __pycache__ -type f); }
changed=$(changed quickstart.py '*/torchrec_recstore/*'; changed installed '*torchrec_recstore*')
test -z "$changed" || { echo "the installed packages have changed: $changed"; exit 1; }
