"""The entry `python -m llava_fsdp.prepare`; main.py has what it does."""

from llava_fsdp.runtime.log import leave_noise_out

if __name__ == "__main__":
    leave_noise_out()  # before transformers is imported

    from llava_fsdp.prepare.main import main

    main()
