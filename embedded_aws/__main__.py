"""An empty AWS account on this machine, until Ctrl-C: python -m embedded_aws"""

import argparse
import contextlib
import sys
import threading

from embedded_aws.server import EmbeddedAws, PortInUse

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m embedded_aws", description=__doc__)
    add = parser.add_argument
    add("--port", type=int, default=5566, help="0 for a free one, default: %(default)s")
    add("--region", default="us-east-1", help="default: %(default)s")
    options = parser.parse_args()
    try:
        with contextlib.suppress(KeyboardInterrupt), EmbeddedAws(**vars(options)) as aws:
            print(aws.exports(), end="", flush=True)
            threading.Event().wait()
    except PortInUse as error:
        sys.exit(str(error))
