"""Has botocore read the models of AWS's services once a process: import it before moto.

They are megabytes of JSON, which each session of moto's and each client's would read again.
"""

import botocore.loaders
import botocore.session

_loader = botocore.loaders.create_loader()
botocore.session.create_loader = lambda *_: _loader
