"""What Python runs before anything else in the processes that tests start.

Keras imports these where they are, which is two fifths of its start, and few tests need them: those
set TF_ADASUM_TEST_IMPORTS=all.
"""

import os
import sys

if os.environ.get("TF_ADASUM_TEST_IMPORTS") != "all":
    sys.modules.update(dict.fromkeys(("matplotlib", "sklearn")))
