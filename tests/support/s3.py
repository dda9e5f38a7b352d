"""A server of S3 on this machine, behind a proxy that can spoil its answers."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from faulty_proxy import FaultyProxy
from moto.server import ThreadedMotoServer

SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


@contextmanager
def s3_server() -> Iterator[FaultyProxy]:
    """Start the server, and set the variables with which the libraries find it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    made = FaultyProxy(server.get_host_and_port()[1])
    variables = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_ENDPOINT_URL": made.url,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield made
    made.close()
    server.stop()
