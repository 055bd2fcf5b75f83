"""From tensors to a running kernel: describe the call, choose, bind once, then just run.

``call``      what one call is: its static side, its tensors, its settings; masks known to hide nothing
``dispatch``  the way of a call: choose, bind, check, try the next; the cache in front of it
``inputs``    checks on tensors, and the question they ask
``bind``      a selection turned into a closure; ``kernels`` loads what it closes over, gradients around it
``compiled``  the same under torch.compile
``refusals``  what a kernel's error says, and what the process remembers of it
``selfcheck`` the first call of an unproven kernel, compared with ``reference``
``cache``     a bounded dictionary
``adaptations``  exact changes of a call, made on tensors
``leave_replay``  the file that a call which failed leaves; ``replay_file`` what it holds
"""
