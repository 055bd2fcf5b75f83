"""Many ranks' files brought into one answer, ``attnsel compare`` of their folder: who differs, and why.

``lines`` finds files and reads what their lines say, ``answer`` brings it together, ``document`` writes it.
"""
