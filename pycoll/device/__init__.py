"""Operations on device arrays."""
