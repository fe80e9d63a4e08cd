import sys

from gymtrio.cli.main import main

sys.exit(main())
