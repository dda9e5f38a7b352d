"""Entry point of `python -m llava_fsdp.report`; see main.py for what it does."""

from llava_fsdp.runtime.process.safe_path import prepare_python

if __name__ == "__main__":
    prepare_python()  # before other imports, which files there might hide

from llava_fsdp.report.main import main

if __name__ == "__main__":
    main()
