"""What an activation quantisation is: re-exported from `adapters`, where linears are read into it."""

from ..adapters.activation_quant import GROUP_SIZES as GROUP_SIZES
from ..adapters.activation_quant import ActivationQuant as ActivationQuant
from ..adapters.activation_quant import ActivationQuantError as ActivationQuantError
