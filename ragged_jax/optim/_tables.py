"""The values of the dynamic map, as constants: rebuilt in another precision they differ in the last bit.

Little-endian float32. `tests/test_adam8bit_maps.py` holds them against the rule that defines them.
"""

from base64 import b64decode

import numpy as np

_SIGNED = (
    "t6MTNZQaWjb/BQI3BkKyNzSANziz74o4Sx+6OAvXIzkF54w5g+LHOQFvATrB7B46gGo8Oj7oWTr/ZXc6ne+nOvyp8Totsh07XI9CO4psZzvd"
    "JIY7dJOYOw0CqzukcL07O9/PO9NN4jtqvPQ7gZUDPM3MDDwYBBY8ZDsfPEjhOjzD9Wg8H4WLPF2Pojyambk816PQPBWu5zxSuP48SOEKPWdm"
    "Fj2F6yE9o3AtPcP1OD3hekQ9AABQPR+FWz09Cmc9XY9yPXsUfj3NzIQ9XY+KPetRkD17FJY9CtebPZqZoT0qXKc9uB6tPUjhsj3Xo7g9Z2a+"
    "PfcoxD2F68k9NDPbPQAA+D1mZgo+zcwYPjMzJz6amTU+AABEPmZmUj7NzGA+MzNvPpmZfT4AAIY+NDONPmZmlD6amZs+zMyiPgAAqj4zM7E+"
    "Zma4PpqZvz7MzMY+AADOPjMz1T5mZtw+mpnjPszM6j4AAPI+MjP5PjMzAD/MzAM/ZmYHPwAACz+amQ4/NDMSP83MFT9mZhk/AAAdP5qZID80"
    "MyQ/zcwnP2ZmKz8AAC8/mpkyPzQzNj/NzDk/ZmY9PwAAQT+amUQ/MzNIP83MSz9mZk8/AABTP5qZVj8zM1o/zcxdP2ZmYT8AAGU/mploPzMz"
    "bD/NzG8/ZmZzPwAAdz+amXo/MzN+Pw=="
)
_UNSIGNED = (
    "qnuuNJgJUDU4mw429sySNlFM3jbV5RQ3bhKDN6Bx4Tdo6B84ABhPOJpHfjiZu5Y4ZFOuODHrxThLWQY5ylRBOUlQfDnkpZs5oiO5OWOh1jki"
    "H/Q5cc4IOlCNFzowTCY6EAs1Ou/JQzrQiFI6r0dhOo4GcDpuxX46BoGVOjVeujpkO986SgwCO+F6FDt46SY7EFg5O6fGSztANV4716NwOzeJ"
    "gTuCwIo7z/eTOxovnTtmZqY7sp2vO/3UuDtKDMI7lUPLO+F61Dsust07eOnmO8Ug8DsPWPk7rkcBPFTjBTz5fgo8oBoPPEW2EzzrURg8ku0c"
    "PDeJITwqXC88Z2ZGPKNwXTzienQ8j8KFPK9HkTzNzJw861GoPAvXszwpXL88R+HKPGdm1jyH6+E8o3DtPMP1+DxwPQI9AAAIPY/CDT0fhRM9"
    "r0cZPT0KHz3NzCQ9XI8qPetRMD17FDY9Ctc7PZqZQT0oXEc9uB5NPUfhUj3Xo1g9Z2ZePfcoZD2H62k9Fa5vPaNwdT0zM3s94nqAPSpcgz1x"
    "PYY9uB6JPQAAjD1I4Y49kMKRPdejlD0fhZc9Z2aaPa9HnT32KKA9PgqjPYXrpT3NzKg9Fa6rPVyPrj2kcLE961G0PTMztz17FLo9w/W8PQvX"
    "vz1SuMI9mpnFPeJ6yD0pXMs9AADUPWZm4j3NzPA9MzP/PczMBj4AAA4+NDMVPmZmHD6amSM+zMwqPgAAMj40Mzk+ZmZAPpqZRz7MzE4+AABW"
    "PjQzXT5mZmQ+mplrPszMcj4AAHo+mZmAPjMzhD7NzIc+ZmaLPgAAjz6amZI+MzOWPszMmT5mZp0+AAChPpqZpD4zM6g+zMyrPmZmrz4AALM+"
    "mpm2PjMzuj7MzL0+ZmbBPgAAxT6amcg+MzPMPszMzz5mZtM+AADXPpqZ2j4zM94+zMzhPmZm5T4AAOk+mpnsPjMz8D7MzPM+Zmb3PgAA+z6Z"
    "mf4+mhkBP2bmAj8zswQ/AIAGP8xMCD+aGQo/ZuYLPzSzDT8AgA8/zUwRP5oZEz9m5hQ/NLMWPwCAGD/NTBo/mhkcP2bmHT80sx8/AIAhP81M"
    "Iz+aGSU/ZuYmPzSzKD8AgCo/zUwsP5oZLj9m5i8/NLMxPwCAMz/NTDU/mhk3P2bmOD80szo/AIA8P81MPj+aGUA/ZuZBPzSzQz8AgEU/zExH"
    "P5oZST9m5ko/NLNMPwCATj/MTFA/mhlSP2bmUz80s1U/AIBXP8xMWT+aGVs/ZuZcPzSzXj8AgGA/zExiP5oZZD9m5mU/NLNnPwCAaT/MTGs/"
    "mhltP2bmbj80s3A/AIByP8xMdD+aGXY/ZuZ3PzSzeT8AgHs/zEx9P5oZfz8="
)


def signed() -> np.ndarray:
    """The 127 positive values below 1 of the signed map, rising."""
    return np.frombuffer(b64decode(_SIGNED), "<f4")


def unsigned() -> np.ndarray:
    """The 254 values between 0 and 1 of the unsigned map, rising."""
    return np.frombuffer(b64decode(_UNSIGNED), "<f4")
