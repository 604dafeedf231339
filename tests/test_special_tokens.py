"""Special tokens in texts, the tokens that end a generation, and exactly one BOS."""

import pytest
from tiny_tokenizers import PRE, tiny_bpe, tiny_spm

from realizar_torch.errors import GGUFError


class TestSpecialTokens:
    def test_control_tokens_come_from_text_only_when_asked_for(self) -> None:
        tokenizer = tiny_bpe()
        end = tokenizer.vocab_size - 1
        assert end not in tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.encode("a<|endoftext|>b", parse_special=True).count(end) == 1

    @pytest.mark.parametrize("added", [("<think>", "<th"), ("<th", "<think>")])
    def test_user_defined_tokens_always_do(self, added: tuple[str, str]) -> None:
        tokens = PRE["metadata"]["tokenizer.ggml.tokens"]
        kinds = [*PRE["metadata"]["tokenizer.ggml.token_type"], 4, 4]
        tokenizer = tiny_bpe(tokens=[*tokens, *added], token_type=kinds)
        ids = tokenizer.encode("a<think>b<th")
        # the longer token goes first, whatever its id and whatever is found further left
        assert ids.count(len(tokens)) == 1 and ids.count(len(tokens) + 1) == 1
        assert tokenizer.decode(ids) == "a<think>b<th"

    def test_a_kind_that_nobody_knows_stands_for_no_text(self) -> None:
        tokens, kinds = (PRE["metadata"][f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
        tokenizer = tiny_bpe(tokens=[*tokens, "one", "two"], token_type=[*kinds, 1, 9])
        assert [tokenizer.decode([len(tokens) + i]) for i in (0, 1)] == ["one", ""]

    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({"eos_token_id": 1}, [1]),
            ({"eos_token_id": 2, "eot_token_id": 7}, [2, 7]),
            ({"eos_token_id": 2, "eot_token_id": 7, "eom_token_id": 5, "fim_sep_token_id": 3}, [2, 3, 5, 7]),
            ({"eos_token_id": 99999, "eot_token_id": 7}, [7]),
            ({}, []),
        ],
    )
    def test_end_of_generation_by_id(self, keys: dict[str, int], expected: list[int]) -> None:
        tokens = [f"t{i}" for i in range(8)]
        names = {"bos_token_id": None, "eos_token_id": None, "tokens": tokens, "token_type": None, **keys}
        assert list(tiny_bpe(**names, merges=["t 0"]).eos_token_ids) == expected

    @pytest.mark.parametrize(
        ("tokens", "ending", "hidden"),
        [
            (["x", "<|im_end|>", "<end_of_turn>", "<|eot_id|>", "[EOT]"], [1, 2, 3, 4], [1, 2, 3, 4]),
            (["x", "<fim_pad>", "<reponame>", "<|file_sep|>", "<fim_middle>"], [1, 2, 3], [1, 2, 3, 4]),
            # the lowest of several texts for one role
            (["x", "[PAD]", "<PAD>"], [1], [1]),
            # gpt-oss: an answer has parts that end with <|end|>, and shows its channels
            (["x", "<|return|>", "<|call|>", "<|end|>", "<|channel|>"], [1, 2], [1, 2]),
            (["x", "<|call|>", "<|end|>"], [1, 2], [1, 2]),
            (["x", "<|tool_response>", "</s>"], [1], [1]),
            (["x", "</s>"], [1], [1]),
        ],
    )
    def test_end_of_generation_by_text(self, tokens: list[str], ending: list[int], hidden: list[int]) -> None:
        tokenizer = tiny_bpe(
            tokens=tokens, token_type=None, merges=["a b"], bos_token_id=None, eos_token_id=None
        )
        assert list(tokenizer.eos_token_ids) == ending
        assert [i for i in range(len(tokens)) if not tokenizer.decode([i])] == hidden

    def test_llama_models_have_bos_and_eos_by_default(self) -> None:
        tokenizer = tiny_spm()
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, None)
        assert tiny_bpe(bos_token_id=None, eos_token_id=None, padding_token_id=-1).bos_token_id is None


class TestTurnEnd:
    """`tiny_bpe` knows <|endoftext|> as an end of generation, and nothing else."""

    @staticmethod
    def ends(template: str | None, kind: int = 3, name: str = "<|done|>") -> tuple[int, ...]:
        """`turn_end_ids` as distances from the size of the golden vocabulary, which gets one more token."""
        tokens, kinds = (PRE["metadata"][f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
        tokenizer = tiny_bpe(tokens=[*tokens, name], token_type=[*kinds, kind])
        tokenizer.chat_template = template
        return tuple(token - len(tokens) for token in tokenizer.turn_end_ids)

    LOOP = "{% for m in messages %}{{ m.role }}: {{ m.content }}"

    def test_a_token_that_the_file_does_not_name(self) -> None:
        assert self.ends(self.LOOP + "\n<|done|>\n{% endfor %}") == (0,)
        # the file names the second of the two
        assert self.ends(self.LOOP + "<|done|><|endoftext|>{% endfor %}") == ()
        assert self.ends(self.LOOP + "[EOT]{% endfor %}", name="[EOT]") == ()

    def test_only_the_beginning_of_the_next_turn_ends_this_one(self) -> None:
        user = (
            "{% for m in messages %}{% if m.role == 'user' %}<|done|>{% endif %}{{ m.content }}{% endfor %}"
        )
        assert self.ends(user) == (0,)

    @pytest.mark.parametrize(
        "template",
        [
            None,
            LOOP + "\n{% endfor %}",
            # before the answer, or after the next question
            "<|done|>" + LOOP + "{% endfor %}",
            LOOP + "{% if loop.index == 3 %}<|done|>{% endif %}{% endfor %}",
            "{{ messages[0].content }}<|done|>",
            "{{ raise_exception('no') }}",
        ],
    )
    def test_templates_that_end_answers_by_no_token(self, template: str | None) -> None:
        assert self.ends(template) == ()

    def test_tokens_that_show_in_an_answer_end_none(self) -> None:
        assert self.ends(self.LOOP + "<|done|>{% endfor %}", kind=4) == ()


class TestBos:
    """Model type × add_bos_token × a template that writes BOS: exactly one where one is wanted, else none."""

    @pytest.mark.parametrize("template_bos", [False, True])
    @pytest.mark.parametrize(("added", "bpe", "spm"), [(True, 1, 1), (False, 0, 0), (None, 0, 1)])
    def test_count(self, added: bool | None, bpe: int, spm: int, template_bos: bool) -> None:
        template = ("{{ bos_token }}" if template_bos else "") + "{{ messages[0].content }}"
        for tokenizer, count in ((tiny_bpe(add_bos_token=added), bpe), (tiny_spm(add_bos_token=added), spm)):
            ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], chat_template=template)
            expected = max(count, int(template_bos))
            assert ids.count(tokenizer.bos_token_id) == expected
            assert ids[:expected] == [tokenizer.bos_token_id] * expected
            assert tokenizer.encode("hi").count(tokenizer.bos_token_id) == count

    def test_a_wanted_token_must_exist(self) -> None:
        with pytest.raises(GGUFError, match=r"adds BOS.*bos_token_id"):
            tiny_bpe(add_bos_token=True, bos_token_id=None)
        with pytest.raises(GGUFError, match=r"adds EOS.*eos_token_id"):
            tiny_bpe(add_eos_token=True, eos_token_id=10**6)

    def test_eos_is_added_to_texts_but_not_to_chats(self) -> None:
        tokenizer = tiny_spm(add_eos_token=True)
        assert tokenizer.encode("hi")[-1] == 2
        ids = tokenizer.apply_chat_template([{"role": "user"}], chat_template="hi")
        assert ids == tokenizer.encode("hi")[:-1]
