import pytest

from groundhop.pipeline.cloze import ask
from groundhop.pipeline.selfcontained import is_selfcontained, refusal

REFUSED = [
    "According to the passage, in which year was the mill burned?",
    "Based on the given context, who designed the Ostwall lighthouse?",
    "As described earlier, which guild ran the Ostwall lighthouse?",
    "In this study, which drug lowered blood pressure most?",
    "What did the author conclude about the Ostwall lighthouse?",
    "Who founded the company mentioned above?",
    "When was she elected mayor of Port Ostwall?",
    "What year was it founded in Denmark?",
    "Which of these harbours is the oldest in Norway?",
    "Who is the current keeper of the Ostwall lighthouse?",
    "What is the latest version of the Ostwall atlas?",
    "How old is Anna Berg of Ostwall?",
    "What is the population of Ostwall?",
    "Who is the mayor of Port Ostwall?",
    "Which river flows through the city?",
    "How many delegates attended the congress?",
    "The year of the flood",
    "",
]
ACCEPTED = [
    "In which year did the council move its lantern to the pier that the guild of Ostwall sold?",
    "In which year did the guild of Port Ostwall sell the mill that later housed the Anchor bakery?",
    "Which ship did Karl Lindqvist command before he became governor of Ostwall in 1845?",
    "What was the population of Port Ostwall in 1901?",
    "As of 2019, who was the current mayor of Port Ostwall?",
    "Which board in Port Ostwall sold its pier to the railway?",
    "Which alternating current motor did Nikola Tesla patent in 1888?",
    "Until what year did the Treaty of Ostwall let Denmark mine the coal of the Saar?",
]


@pytest.mark.parametrize("question", REFUSED)
def test_questions_that_lean_on_something_unseen_are_refused(question: str) -> None:
    assert refusal(question)


@pytest.mark.parametrize("question", ACCEPTED)
def test_questions_that_stand_alone_pass(question: str) -> None:
    assert refusal(question) is None


def test_words_inside_a_quotation_lean_on_nothing() -> None:
    phrase = "He currently opened, as mentioned above, the harbour of this town at ____."
    assert is_selfcontained(ask(phrase, "year", "", ("harbour", "guild")))
