"""The pipeline: stages, the notebook runner, and the command line ``tepo``."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  the message must reach those whose Python is older
    message = "Python 3.11 or newer is needed; this is {}.{} ({}). Run 'make PYTHON=python3.11 venv'."
    sys.exit(message.format(sys.version_info[0], sys.version_info[1], sys.executable))
