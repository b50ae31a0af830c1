"""instructor: answers of a type, by JSON schema and by JSON, whole and in parts."""

# pyright: reportMissingImports=false
import instructor
import openai
from clients.fruit import Fruit
from clients.served import MESSAGES, TYPED, Served, told
from instructor.core import InstructorRetryException

ASKED = {"max_retries": 1, **TYPED}


def typed(served: Served, model: str, mode: instructor.Mode) -> None:
    """A fruit, at once and as it comes; the schema of the two is enforced, so no try is lost."""
    client = openai.OpenAI(base_url=served.url, api_key="x", max_retries=0)
    asking = instructor.from_openai(client, mode=mode)
    asked = {"model": model, "messages": MESSAGES, **ASKED}
    fruit, raw = asking.create_with_completion(response_model=Fruit, **asked)
    assert isinstance(fruit, Fruit)
    assert raw.usage.completion_tokens > 0
    *_, last = asking.create_partial(response_model=Fruit, **asked)
    assert last.model_dump() == fruit.model_dump()


if __name__ == "__main__":
    its = told()
    for name in its.answers:
        typed(its, name, instructor.Mode.JSON_SCHEMA)
    try:
        typed(its, "nobody", instructor.Mode.JSON_SCHEMA)
    except InstructorRetryException as error:
        assert "The model `nobody` does not exist." in str(error)
    else:
        raise AssertionError("an unknown model was answered")
