"""Many ranks' files brought into one answer, ``attnsel report``: who differs, and why.

``lines`` finds files and reads what their lines say, ``answer`` brings it together, ``document`` writes it.
"""
