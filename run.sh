cd /tmp/wt && PYTHONPATH=/tmp/wt/src /work/main/.venv/bin/python -m pytest -q -p no:cacheprovider "$@"
