"""Entry point of `torchrun -m llava_fsdp.train`; see run.py for what it does."""

from llava_fsdp.runtime.process.safe_path import prepare_python

if __name__ == "__main__":
    prepare_python()  # before other imports, which files there might hide

from llava_fsdp.train.run import run

if __name__ == "__main__":
    run()
