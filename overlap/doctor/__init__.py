"""The `doctor` command: does this installation work, and what does a bug report need to say of it?

shadows   other packages of the same name;  needs: what the library uses of PyTorch's private parts
trial     a chain beside plain DDP in this process;  command: prints all of it
"""
