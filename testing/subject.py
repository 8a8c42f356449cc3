"""The former name of `contract_case.ContractCase`, for the one file that still says it: fusing.py."""

from __future__ import annotations

from .contract_case import ContractCase as Subject

__all__ = ["Subject"]
