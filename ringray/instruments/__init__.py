"""What one rank does, for whoever asks.

progress  the last sign of life of a rank
timeline  spans of compute and transfer
hops      spans joined to hops; hidden and exposed communication
"""
