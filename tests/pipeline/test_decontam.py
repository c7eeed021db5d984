import pytest

from groundhop.pipeline.decontam import contaminated, ngrams, normalised_words

BENCHMARK = (
    "Which bell founder from the eastern valley, later a member of the salt council, "
    "cast the great bell of Ostwall before the flood of the old mill?"
)


def found(candidate: str, question: str = BENCHMARK, answer: str = "Ruben Aker") -> str | None:
    match = contaminated(candidate, question, answer, benchmark="b-7")
    return None if match is None else match.span


def test_a_copy_is_flagged_with_the_span_and_the_benchmarks_name() -> None:
    candidate = f"Try this: {BENCHMARK.upper()} Thanks."
    match = contaminated(candidate, BENCHMARK, "Ruben Aker", benchmark="b-7")
    assert match is not None and match.benchmark == "b-7"
    assert candidate[match.start : match.end] == match.span == BENCHMARK.upper().rstrip("?")


@pytest.mark.parametrize(
    "candidate",
    [
        "...",
        "A.",
        "",
        "Which bell founder from the",
        "Ruben Aker",
        "Ruben Aker cast the great bell of Ostwall.",
        "Which founder, a member of the council, cast the bell of a mill before the old flood of the eastern valley?",
    ],
)
def test_stubs_common_words_and_shared_answers_are_not(candidate: str) -> None:
    assert found(candidate) is None


def test_thirteen_words_in_a_row_are_a_copy_and_twelve_are_none() -> None:
    words = BENCHMARK.replace(",", "").split()
    assert found("So " + " ".join(words[3:16]) + " perhaps") == " ".join(words[3:16])
    assert found("So " + " ".join(words[3:15]) + " perhaps") is None


def test_a_short_benchmark_question_must_stand_there_whole() -> None:
    short = "Which bell founder cast the great bell of Ostwall?"
    assert found(f"I ask: {short}", short, "Aker") is not None
    assert found("Which bell founder cast the great bell?", short, "Aker") is None


@pytest.mark.parametrize("stub", ["...", "A.", "True or false?", "Who is she?"])
def test_a_benchmark_stub_flags_nothing_not_even_itself(stub: str) -> None:
    assert found(stub, stub, "A") is None


def test_rules_and_repeated_words_identify_nothing() -> None:
    assert ngrams("la la la la la la la la la la la la la la la la") == ()


def test_spelling_variants_of_one_text_are_the_same_words() -> None:
    assert (
        normalised_words("Café—FIN, “naïve”_") == normalised_words("cafe\u0301 fin naive") == ["cafe", "fin", "naive"]
    )


def test_ngrams_cover_every_run_once() -> None:
    text = " ".join(f"w{number}" for number in range(15))
    assert ngrams(text) == tuple(" ".join(f"w{n}" for n in range(start, start + 13)) for start in range(3))
