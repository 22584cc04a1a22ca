"""Who needs which rows, which message carries them, and when. No torch.

geometry   visible pairs and needed rows in closed form
routes     the ranks that a chunk visits, and when
walk       the messages along a route
script     what each rank does at each step
occupancy  rows held at each step
"""
