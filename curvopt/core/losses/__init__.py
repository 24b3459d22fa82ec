"""Losses and the roots of their Hessians. Importing the package registers PyTorch's losses.

::

    loss_search ──► loss_call, pytorch_losses    an extended loss module
                    functional_losses            F.cross_entropy, read off the graph
                    generic_loss                 any other, by double backward
                    ──► hessian_root: S with S S^T = the Hessian in the outputs of the network
"""

from curvopt.core.losses import pytorch_losses

__all__ = ["pytorch_losses"]
