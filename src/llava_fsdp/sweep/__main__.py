"""Entry point of `python -m llava_fsdp.sweep`, which runs several trainings with different settings; see
sweep/main.py."""

from llava_fsdp.sweep.main import main

if __name__ == "__main__":
    main()
