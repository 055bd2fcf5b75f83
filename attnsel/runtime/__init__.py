"""From tensors to a running kernel: describe the call, choose, bind once, then just run.

``call``     what one call is, without its tensors' data
``inputs``   checks on tensors, and the question they ask; ``contents`` checks on the numbers in them
``bind``     a selection turned into a closure that runs it
``cache``    which closure belongs to which call signature
``autograd`` gradients around a kernel of the contract
``compiled`` the same under torch.compile
``foreign``  kernels of plug-ins; ``selfcheck`` the first call of an unproven kernel, held against tiled
``yardstick`` which rows of it, and how far rounding may put them off
"""
