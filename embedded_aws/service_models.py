"""Makes botocore read the models of AWS's services once per process: import it before moto.

Otherwise each session of moto and of each client would read megabytes of JSON again.
"""

import botocore.loaders
import botocore.session

_loader = botocore.loaders.create_loader()
botocore.session.create_loader = lambda *_: _loader
