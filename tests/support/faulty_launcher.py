"""`llava-fsdp train` whose ranks run faulty.py, which can be given faults and a pace."""

import sys
from pathlib import Path

from llava_fsdp.train.launch import agent, launcher


def main() -> None:
    if sys.argv[1:2] == ["agent"]:
        del sys.argv[1]
        agent.PROGRAM = (str(Path(__file__).with_name("faulty.py")),)
        agent.main()
    else:
        launcher.AGENT = (sys.executable, __file__, "agent")
        launcher.main()


if __name__ == "__main__":
    main()
