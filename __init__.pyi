from . import adapters as adapters
from . import fusion as fusion
from . import registry as registry
from . import testing as testing
from .adapters.errors import LayerfuseError as LayerfuseError
from .adapters.parallel import tensor_parallel as tensor_parallel
from .adapters.specs import FinalNormSpec as FinalNormSpec
from .adapters.specs import GatedDeltaNetSpec as GatedDeltaNetSpec
from .adapters.specs import GatedMLPSpec as GatedMLPSpec
from .adapters.specs import GatedNormSpec as GatedNormSpec
from .adapters.specs import GQASpec as GQASpec
from .adapters.specs import MLASpec as MLASpec
from .adapters.specs import MLPSpec as MLPSpec
from .adapters.specs import NormSpec as NormSpec
from .adapters.specs import Parallel as Parallel
from .adapters.specs import ResidualSpec as ResidualSpec
from .adapters.specs import RopeSpec as RopeSpec

__version__: str
