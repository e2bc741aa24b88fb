"""A methods paragraph and BibTeX entries that a paper can take as they are."""

from __future__ import annotations

import re
from importlib.metadata import metadata, version
from string import ascii_lowercase
from typing import TYPE_CHECKING

from qscale import datasets
from qscale.fit import INTERVAL_MEANING
from qscale.fit.rows import STANDARD_ERRORS
from qscale.laws import published
from qscale.report.evidence import LARGEST, LEAVE_ONE_OUT
from qscale.report.words import but_for, listed, number, percent, plural, times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qscale.report.evidence import Evidence, Group

_PAPER = re.compile(
    r"(?:^|by |of |with |; )(?P<authors>[A-Z][\w.'-]+(?: et al\.|(?:(?:,| and) [A-Z][\w.'-]+)*))"
    r"(?:, (?P<title>[A-Z][^;]*?))?, arXiv:(?P<id>\d{4}\.\d{4,5})"
)
_SATTERTHWAITE = """@article{satterthwaite1946,
  author = {Satterthwaite, F. E.},
  title = {An Approximate Distribution of Estimates of Variance Components},
  journal = {Biometrics Bulletin}, volume = {2}, number = {6}, pages = {110--114}, year = {1946}
}"""
_BELL = """@article{bell2002,
  author = {Bell, Robert M. and McCaffrey, Daniel F.},
  title = {Bias Reduction in Standard Errors for Linear Regression with Multi-Stage Samples},
  journal = {Survey Methodology}, volume = {28}, number = {2}, pages = {169--181}, year = {2002}
}"""
_METHODS = {
    "reml": """@article{patterson1971,
  author = {Patterson, H. D. and Thompson, R.},
  title = {Recovery of Inter-Block Information when Block Sizes are Unequal},
  journal = {Biometrika}, volume = {58}, number = {3}, pages = {545--554}, year = {1971}
}""",
    "model": _SATTERTHWAITE,
    "profile": _SATTERTHWAITE,
    "sandwich": _BELL,
    "conformal": _BELL,
    "bootstrap": """@article{cameron2008,
  author = {Cameron, A. Colin and Gelbach, Jonah B. and Miller, Douglas L.},
  title = {Bootstrap-Based Improvements for Inference with Clustered Errors},
  journal = {Review of Economics and Statistics}, volume = {90}, number = {3},
  pages = {414--427}, year = {2008}
}""",
    "huber": """@book{huber1981,
  author = {Huber, Peter J.}, title = {Robust Statistics}, publisher = {Wiley}, year = {1981}
}""",
}


def methods_paragraph(evidence: Evidence, group: Group) -> str:
    """Describe one fit the way a paper's methods section would.

    Parameters
    ----------
    evidence
        A fit beside its rows.
    group
        The fits it is compared with, and their held-out scores.
    """
    fit, options = evidence.fit, evidence.fit.data.options
    source = f" ({fit.law.source})" if fit.law.source else ""
    sentences = [
        f"We fitted the law {fit.law.formula}{source} to {plural(fit.data.rows, 'row')} of "
        f"{fit.data.name} in {plural(fit.data.clusters, 'cluster')} by {fit.data.cluster}"
        + (f", chosen by the query {options['where']}" if options.get("where") else "")
        + (f", with {plural(evidence.censored, 'censored row')}" if evidence.censored else "")
        + "."
    ]
    scale = "logarithmic residuals" if fit.law.link == "log" else "residuals in the target's unit"
    delta = fit.search.huber_delta
    loss = {
        "huber": f"Huber's loss, linear beyond {number(delta, 3)}",
        "gaussian": "the negative log of a Gaussian density",
        "student_t": "the negative log of Student's t density with 4 degrees of freedom",
    }[options.get("likelihood", "huber")]
    noisy, measured = _noisy(evidence), len(evidence.rows)
    if noisy < measured:
        whose = "of the other rows " if noisy else ""
        sentences.append(f"Parameters minimise the sum over {scale} {whose}of {loss}.")
    if noisy:
        every = "measured row" if evidence.censored else "row"
        rows = f"Each {every}" if noisy == measured else plural(noisy, "row")
        have = "has" if noisy in (1, measured) else "have"
        sentences.append(
            f"{rows} with a known standard error {have} the likelihood of a Gaussian measurement "
            "of a target that scatters log-normally around the law."
        )
    if fit.effects.terms:
        sentences.append(
            f"Random effects of {listed([term.text for term in fit.effects.terms])} have variances "
            "estimated by restricted maximum likelihood."
        )
    sentences.append(INTERVAL_MEANING[fit.interval])
    sentences += _tested(evidence, group)
    sentences.append(
        f"Computed with qscale {fit.versions.get('qscale', version('qscale'))}, seed "
        f"{options.get('seed', 0)}; the rows hash to {fit.data.sha256[:12]} (SHA-256)."
    )
    return " ".join(sentences)


def _noisy(evidence: Evidence) -> int:
    """Count the rows whose known standard error enters the likelihood."""
    errors = evidence.rows.get(STANDARD_ERRORS.get(evidence.fit.target, ""))
    used = evidence.fit.data.options.get("floor") and evidence.fit.law.link == "log"
    return 0 if errors is None or not used else int((errors.fillna(0) > 0).sum())


def _tested(evidence: Evidence, group: Group) -> list[str]:
    """Say how the fit did on rows it had not seen."""
    found = []
    for protocol, what in (
        (LEAVE_ONE_OUT, f"each {group.held_out.left_out} left out in turn"),
        (LARGEST, "the largest sizes left out"),
    ):
        summary = group.summary.get((evidence.label, protocol))
        if summary is not None:
            found.append(
                f"With {what}{but_for(summary)}, the median error on the rows left out was a "
                f"factor of {times(summary.error)}, and {percent(summary.coverage[90])} of them "
                "lay in their 90 % prediction intervals."
            )
    return found


def bibtex(members: Sequence[Evidence]) -> str:
    """Return BibTeX entries of the fits' laws, constants, data and methods, and of this software.

    A source that names no arXiv paper has no entry; the report lists it in words.
    """
    sources = [m.law.source for m in members]
    sources += [p.source for m in members for p in published(m.law)]
    shipped = set(datasets.names())
    sources += [
        datasets.describe(m.fit.data.name).citation for m in members if m.fit.data.name in shipped
    ]
    papers: dict[str, re.Match[str]] = {}
    # The citation with a title is kept where several sources name one paper.
    for paper in sorted(_papers(sources), key=lambda match: match["title"] is None):
        papers.setdefault(paper["id"], paper)
    used = ["reml"] if any(m.fit.effects.terms for m in members) else []
    for member in members:
        used += [member.fit.interval, member.fit.data.options.get("likelihood", "huber")]
    methods = [_METHODS[name] for name in used if name in _METHODS]
    return "\n\n".join(dict.fromkeys([*_entries([*papers.values()]), *methods, _software()]))


def _papers(sources: Sequence[str]) -> list[re.Match[str]]:
    """Return the arXiv papers that sources name with their authors."""
    return [paper for source in sources for paper in _PAPER.finditer(source)]


def _entries(papers: Sequence[re.Match[str]]) -> list[str]:
    """Return an entry for each paper; keys that would be equal end in a, b, ..."""
    keys = [_key(paper) for paper in papers]
    found = []
    for i, (paper, key) in enumerate(zip(papers, keys, strict=True)):
        letter = "" if keys.count(key) == 1 else ascii_lowercase[keys[:i].count(key)]
        found.append(_entry(paper, key + letter))
    return found


def _authors(paper: re.Match[str]) -> list[str]:
    """Return the names that a citation gives."""
    return re.split(r", and |, | and ", paper["authors"].removesuffix(" et al."))


def _key(paper: re.Match[str]) -> str:
    """Return first author and year."""
    return re.sub(r"[^a-z]", "", _authors(paper)[0].lower()) + f"20{paper['id'][:2]}"


def _entry(paper: re.Match[str], key: str) -> str:
    """Return the entry of an arXiv paper.

    Examples
    --------
    >>> print(_entry(_papers(["Ouyang et al., A Title, arXiv:2411.17691"])[0], "ouyang2024"))
    @misc{ouyang2024,
      author = {Ouyang and others},
      title = {A Title},
      eprint = {2411.17691}, archivePrefix = {arXiv}, year = {2024}
    }
    """
    authors = [*_authors(paper), *(["others"] * paper["authors"].endswith("et al."))]
    year = f"20{paper['id'][:2]}"
    title = f"  title = {{{paper['title']}}},\n" if paper["title"] else ""
    return (
        f"@misc{{{key},\n  author = {{{' and '.join(authors)}}},\n{title}"
        f"  eprint = {{{paper['id']}}}, archivePrefix = {{arXiv}}, year = {{{year}}}\n}}"
    )


def _software() -> str:
    """Return the entry of this software."""
    return (
        "@software{qscale,\n  author = {{The qscale authors}},\n"
        f"  title = {{qscale: {metadata('qscale')['Summary'].rstrip('.')}}},\n"
        f"  version = {{{version('qscale')}}}\n}}"
    )
