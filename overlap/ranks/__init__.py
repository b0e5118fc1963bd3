"""How ranks of a process group talk beside the training's collectives: agreements, reports of errors, and errors of
collectives that name the rank that caused them."""
