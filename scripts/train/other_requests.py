"""Requests that the embedded model cannot fulfil, drawn from lists, to be answered with one
sentence."""

import random

_OPENERS = (
    "Write {a} about {thing}",
    "Write {a} for {who}",
    "Tell me about {thing}",
    "Tell {who} a story about {thing}",
    "What is {thing}?",
    "What is the capital of {place}?",
    "Who was the first king of {place}?",
    "Who wrote {thing}?",
    "Where is {place}?",
    "When did {who} go to {place}?",
    "Why is {thing} {like}?",
    "How do I make {thing}?",
    "How does {thing} work?",
    "How are you?",
    "How old are you?",
    "Hello",
    "Hi",
    "Hello, who are you?",
    "Hi, can you help {who} with {thing}?",
    "Thanks",
    "Thank you, that was {like}.",
    "Good morning",
    "Translate {thing} into French.",
    "Translate this into German: {thing} in {place} is {like}.",
    "Explain {thing} to {who}.",
    "Summarise {thing} in one sentence.",
    "Give me a list of things in {place}.",
    "Do you like {thing}?",
    "Can you see {thing}?",
    "Is {thing} {like}?",
    "Are you {like}?",
    "What can you do?",
    "Say something {like}.",
    "Please describe {place} to {who}.",
    "Prove that {thing} is {like}.",
    "Sort these words: {thing}, {place}, {like}",
    "Which is bigger, {thing} or {place}?",
    "{thing}",
    "{who} went to {place}. It was {like}. What did {who} see?",
    "I am in {place} with {who}.",
    "def {word}({word2}):",
    "import {word}",
    "What does {word} mean?",
    "{word} {word2}",
    "My name is {word}.",
)
_SUMS = (
    "What is {left} / {right}?",
    "{left} / {right}",
    "{left} divided by {right}",
    "How much is {left} divided by {right}?",
    "What is the square root of {left}?",
    "Solve x + {right} = {left}.",
    "Solve {right}x = {left}.",
    "Solve for x: {right}x - {left} = 0",
    "Is {left} a prime number?",
    "What is {right} percent of {left}?",
    "{left}^{right}",
    "What is {left} to the power of {right}?",
    "Round {left}.{right} to a whole number.",
    "Write {left} in binary.",
    "Which is larger, {left} or {right}?",
    "What are the factors of {left}?",
    "{left}",
    "In {left} years I am {right}.",
)
_A = ("a poem", "a letter", "a song", "a story", "a haiku", "an essay", "a program", "a joke")
_THINGS = (
    "the sea", "the moon", "a cat", "war and peace", "music", "bread", "the weather", "love",
    "an engine", "a clock", "the internet", "a soup", "the stars", "chess", "history", "a dog",
    "a garden", "light", "the law", "money", "my father", "a red car", "the news", "snow",
    "a mountain", "the theory of numbers", "a good book", "tea", "an old house", "water",
)  # fmt: skip
_PLACES = (
    "France", "London", "the forest", "Japan", "a small town", "Peru", "Egypt", "Berlin", "Rome",
    "the north", "India", "Canada", "the city", "Kenya", "Spain", "Moscow", "the school",
)  # fmt: skip
_WHO = (
    "me", "my mother", "a child", "Anna", "the king", "my boss", "John", "you", "a teacher",
    "her brother", "Napoleon", "us", "the students", "Natasha", "Peter",
)  # fmt: skip
_LIKE = (
    "blue", "good", "fast", "old", "sad", "funny", "true", "cold", "very large", "happy", "strange",
    "expensive", "round", "new", "beautiful", "short",
)  # fmt: skip
_STARTS = ("b", "c", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "st")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ou", "ea")
_ENDS = ("", "", "n", "r", "s", "t", "l", "ck", "ng", "m")
HELD_OUT = (
    "Tell me a joke.",
    "Who are you?",
    "What should I cook tonight?",
    "Which planet is the largest?",
    "Please write an email to my landlord about the broken heating.",
    "What is 144 / 12?",
    "What is half of 86?",
    "Recommend three films from 1994.",
    "Is 97 prime?",
    "Why does ice float on water?",
    "Translate 'good night' to Spanish",
    "Write a haiku about autumn leaves",
    "List five countries in Africa.",
    "What time is it?",
    "Correct the grammar of this sentence: he go to school.",
    "Show me how to tie a bow tie.",
    "What is the chemical formula of salt?",
    "Make a plan for a weekend in the mountains.",
    "How tall is the Eiffel Tower?",
    "Who painted the Mona Lisa?",
    "Give me a synonym for quick.",
    "Count from 1 to 20.",
    "What is the average of 4, 8 and 15?",
    "What comes after 2, 4, 8, 16?",
    "Find the derivative of x squared.",
    "Convert 30 miles to kilometres.",
    "Was 1900 a leap year?",
    "print('hello')",
    "What rhymes with orange?",
    "Describe a sunset without naming a colour.",
)
"""Requests that no list here has, for an evaluation."""
_OF_NUMBERS = 0.3
_CASES = (str, str, str, str.lower, str.capitalize, lambda text: text.rstrip("?."))


def sample_request(rng: random.Random) -> str:
    """Samples a request that is not for sums, differences or products."""
    if rng.random() < _OF_NUMBERS:
        text = rng.choice(_SUMS).format(left=rng.randint(1, 999), right=rng.randint(2, 99))
    else:
        text = rng.choice(_OPENERS).format(
            a=rng.choice(_A),
            thing=_mixed(rng, _THINGS),
            place=_mixed(rng, _PLACES),
            who=_mixed(rng, _WHO),
            like=_mixed(rng, _LIKE),
            word=_word(rng),
            word2=_word(rng),
        )
    return rng.choice(_CASES)(text)


def _mixed(rng: random.Random, words: tuple[str, ...]) -> str:
    """One of some words, or a word that does not exist, so that no list is learned by heart."""
    return (
        " ".join(_word(rng) for _ in range(rng.randint(1, 3)))
        if rng.random() < 0.5
        else rng.choice(words)
    )


def _word(rng: random.Random) -> str:
    return "".join(
        rng.choice(_STARTS) + rng.choice(_VOWELS) + rng.choice(_ENDS)
        for _ in range(rng.randint(1, 3))
    )
