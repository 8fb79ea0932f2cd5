"""Gradients reduced beside the backward pass, in messages that a policy makes.

    gradients in the order     agenda: messages in the order
    of the backward pass  -->  in which all ranks send them
    sizes, times, rates        (policies, choose; pure)

A step's gradients come one after the other. To send each by itself pays a start for every one of
them; to send all as one wastes the time of the backward pass. ``agenda`` has the words,
``policies`` the known ways in between by name, ``simulate`` says how long a step takes with any of
them, and ``choose`` takes the best.

An agenda is a function of values that are alike on all ranks, so ranks never ask each other what to
send next: a message goes when its gradients are there and all messages in front of it have gone.
"""
