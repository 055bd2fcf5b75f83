"""From tensors to a running kernel: describe the call, choose, bind once, then just run.

``call``      what one call is: its static side, its tensors, its settings
``dispatch``  the way of a call: choose, bind, check, try the next; the cache in front of it
``inputs``    checks on tensors, and the question they ask; ``sizes`` and ``contents`` do parts of that
``bind``      a selection turned into a closure; ``kernels`` loads what it closes over
``autograd``  gradients around a kernel of the contract
``compiled``  the same under torch.compile; ``explicit_backward`` for whoever merges partial results
``refusals``  what a kernel's error says, and what the process remembers of it
``selfcheck`` the first call of an unproven kernel, compared with ``reference``
``trivial_mask``  masks that are known to hide nothing; ``fused_qkv`` q, k and v out of one buffer
``cache``     a bounded dictionary
``adaptations``  exact changes of a call, made on tensors; ``adapted_rows`` where rows lie
``leave_replay``  the file that a call which failed leaves; ``replay_file`` what it holds
"""
