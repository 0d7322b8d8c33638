"""Operations that NVIDIA's Transformer Engine computes, if it is installed. Its modules hold no parameters here."""
