"""Program of the server that forks the victims of `torture.py`; its argument is the server's folder."""

import sys
from pathlib import Path

from support.torture import serve

serve(Path(sys.argv[1]))
