"""What we change about Inductor's Triton kernels: early starts (PDL), block sizes, where Triton keeps what it
compiled.
"""
