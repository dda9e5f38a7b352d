"""Entry point of `torchrun -m llava_fsdp.train`; the program is in main.py."""

from llava_fsdp.config import Config, cli

if __name__ == "__main__":
    cli.begin("train", Config)  # before torch is imported, which takes seconds

    from llava_fsdp.train.main import main

    main()
