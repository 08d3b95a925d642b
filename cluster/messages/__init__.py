"""The domain's words: frozen values that cross every boundary. Imports nothing but the standard library.

request   what a client asks for, validated
answer    what it gets: output, statistics, or an error
rounds    what a router and the replicas of a pool say to each other meanwhile
"""
