"""The decayed count with its Markov term, against the formula taken literally."""

import numpy as np
import pytest

from mbolt_mlx.core.markov import Markov


class Literal:
    """The formula, token by token, without a thought for speed."""

    def __init__(self, experts, half_life=12.0, memory=1000.0):
        self.slow, self.lately = np.zeros(experts), np.zeros(experts)
        self.follow, self.visits = np.zeros((experts, experts)), np.zeros(experts)
        self.d, self.fade = 0.5 ** (1 / half_life), 0.5 ** (1 / memory)
        self.before = None

    def token(self, chosen):
        self.slow *= self.d
        self.follow *= self.fade
        self.visits *= self.fade
        for e in chosen:
            self.slow[e] += 1 - self.d
        if self.before is not None:
            self.lately /= 2
            for p in self.before:
                self.lately[p] += 0.5
                self.visits[p] += 1
            for e in chosen:
                self.follow[:, e] += self.lately
        self.before = list(chosen)

    def score(self):
        found = [(self.follow[i] + self.slow) / (self.visits[i] + 1) for i in self.before]
        return np.mean(found, axis=0)


def rows(count, experts=16, k=4, seed=0):
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(experts)[:k] for _ in range(count)])


def test_one_token_at_a_time_is_the_formula():
    policy, literal = Markov(16), Literal(16)
    for row in rows(300):
        policy.expect(row[None])
        literal.token(row)
        np.testing.assert_allclose(policy.worth(), literal.score(), atol=1e-4)


@pytest.mark.parametrize("prompt", [1, 2, 7, 100])
def test_a_prompt_at_once_counts_as_its_tokens_one_by_one(prompt):
    policy, literal = Markov(16), Literal(16)
    for number, part in enumerate((rows(5), rows(prompt, seed=1), rows(3, seed=2))):
        if number == 1:
            policy.expect(part)
        else:
            for row in part:
                policy.expect(row[None])
        for row in part:
            literal.token(row)
    np.testing.assert_allclose(policy.worth(), literal.score(), atol=1e-4)
    np.testing.assert_allclose(policy._follow.T / policy._weight, literal.follow, atol=1e-4)


def test_a_long_prompt_ends_with_nearly_the_same_scores():
    policy, literal = Markov(16), Literal(16)
    prompt = rows(3000)
    policy.expect(prompt)
    for row in prompt:
        literal.token(row)
    np.testing.assert_allclose(policy.worth(), literal.score(), atol=0.05)


def test_neither_a_very_long_prompt_nor_a_very_long_answer_overflows():
    policy = Markov(16, memory=20.0)
    with np.errstate(all="raise", under="ignore"):
        policy.expect(rows(100_000))
        assert np.isfinite(policy.worth()).all()
        for row in rows(3000, seed=1):
            policy.expect(row[None])
    literal = Literal(16, memory=20.0)
    for row in rows(3000, seed=1):
        literal.token(row)
    np.testing.assert_allclose(policy.worth(), literal.score(), atol=1e-3)


def test_victims_are_residents_of_the_lowest_score_and_never_kept_ones():
    policy, literal = Markov(16), Literal(16)
    residents = set(range(10))
    for e in residents:
        policy.admit(e)
    for row in rows(50):
        policy.expect(row[None])
        literal.token(row)
        keep = set(row.tolist())
        order = sorted(residents - keep, key=lambda e: literal.score()[e])
        assert set(policy.victims(3, keep)) == set(order[:3])
        assert policy.victims(1, keep) == order[:1]
        assert len(policy.victims(99, keep)) == len(residents - keep)
    policy.drop(3)
    assert 3 not in policy.victims(99, ())


def test_equal_scores_go_by_how_long_they_have_been_resident():
    policy = Markov(8)
    for e in (5, 2, 7):
        policy.admit(e)
    assert policy.victims(3, ()) == [5, 2, 7]


def test_a_new_conversation_begins_with_the_order_of_the_last_one():
    policy = Markov(8)
    for e in (5, 2, 7):
        policy.admit(e)
    for e in (7, 2, 7, 5, 7):
        policy.expect(np.array([[e]]))
    policy.renew()
    assert policy.victims(3, ()) == [2, 5, 7]
    policy.expect(np.array([[2]]))
    assert policy.victims(2, {2}) == [5, 7]


def test_a_new_conversation_forgets_how_often_but_not_who_follows_whom():
    policy = Markov(8)
    for _ in range(20):
        for e in (1, 2):
            policy.expect(np.array([[e]]))
    follow = policy._follow.copy()
    policy.renew()
    assert policy.worth()[[1, 2]].max() < 1e-9
    assert np.array_equal(policy._follow, follow)
    policy.expect(np.array([[1]]))
    assert policy.worth().argmax() == 2


def test_a_token_counts_once_whether_it_was_expected_or_not():
    expected, surprised = Markov(16), Markov(16)
    for row in rows(20):
        tokens = row[None]
        expected.expect(tokens)
        expected.use(tokens.copy())
        surprised.use(tokens)
    np.testing.assert_array_equal(expected.worth(), surprised.worth())
