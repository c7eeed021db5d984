"""The receiving side: where changed bits go in a live server, and what a replica may claim to hold."""
