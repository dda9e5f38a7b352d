from llava_fsdp.commands import start

if __name__ == "__main__":
    start("report", is_module=True)
