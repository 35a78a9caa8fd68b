"""Generates the data-wrangling examples that the bundled demo model is trained and tested on.

Five tasks: dates to ISO form, person names, unit conversion, postal addresses, and deciding
whether two records name the same thing.  Everything is drawn from one `random.Random`, so a seed
fixes the stream, and training streams never contain a held-out record.

It does not know the tokenizer, the model, or where any file is written.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal

HELD_OUT_SEED = 20_240_309
HELD_OUT_PER_TASK = 100

FIRST = """Aaron Adam Alice Amara Amy Andrew Anita Anna Anton Beatrice Ben Bianca Boris Brian Bruno
Carla Carmen Cedric Chen Clara Daniel David Diana Diego Edith Elena Elias Emily Emma Eric Esther
Fatima Felix Fiona Frank Grace Greta Hanna Harold Hassan Helen Henry Hugo Ines Irene Isaac Ivan
Jack Jane Jasmine Joan John Jorge José Julia Karen Karl Kavita Kenji Laura Leila Leo Linda Louis
Lucy Marco Maria Mark Martha Mateo Max Mia Miguel Mona Nadia Naomi Nina Noah Nora Olga Oliver Omar
Oscar Paul Peter Petra Priya Rachel Raj Renée Robert Rosa Ruth Samuel Sara Sofia Stefan Susan
Tara Thomas Tobias Uma Victor Vera Walter Wendy Xavier Yara Yusuf Zoë""".split()
LAST = """Abbott Adams Ahmed Alvarez Baker Banerjee Barnes Becker Bennett Bishop Bloom Brandt Brooks
Brown Burke Carter Chan Clark Cole Cooper Costa Cruz Dalton Davis Díaz Dixon Doyle Duncan Dutta
Ellis Evans Farrell Fischer Fletcher Foster Fuentes Garcia Gibson Gomez Gupta Hall Hansen Harper
Hayes Hoffman Holt Hughes Ibrahim Jackson Jensen Johnson Jones Kaplan Keller Khan Kim Klein Kumar
Larsen Lee Lopez Lowe Marsh Martin Mason Mehta Meyer Miller Mitchell Moore Morales Müller Murphy
Nakamura Newman Nguyen Novak Okafor Olsen Ortiz Owens Park Parker Patel Perez Pham Porter Quinn
Ramirez Reed Reyes Rossi Roy Russo Santos Sato Schmidt Shah Silva Singh Smith Stone Suzuki Tanaka
Taylor Torres Turner Vargas Vega Wagner Walsh Wang Weber White Wong Young Zhang Zimmer O'Brien
O'Connor O'Neill McDonald McKenna McCarthy""".split()
STREET = """Elm Oak Maple Cedar Pine Walnut Chestnut Birch Willow Main Church School Park Lake River
Hill Mill Spring Washington Lincoln Jefferson Madison Jackson Franklin Highland Sunset Meadow Forest
Union Center Market Water Bridge Prospect Grove Harbor Orchard Railroad Valley Summit Pleasant
Garden Canal Liberty Academy Cherry Locust Laurel Hickory Magnolia""".split()
CITY = """Springfield;Dayton;Salem;Madison;Clinton;Georgetown;Fairview;Greenville;Bristol;Oxford
Ashland;Burlington;Manchester;Milton;Newport;Auburn;Dover;Hudson;Kingston;Lexington;Riverside
Arlington;Cleveland;Oakland;Winchester;Jackson;Franklin;Marion;Troy;Monroe;Columbia;Florence
Lakewood;Richmond;Aurora;Boulder;Camden;Denton;Eugene;Fargo;Geneva;Houston;Ithaca;Juneau;Laredo
Mobile;Nashua;Omaha;Peoria;Quincy;Racine;Savannah;Tulsa;Utica;Vernon;Waco;Yuma;New Haven
Cedar Rapids;Fort Worth;Grand Forks;Long Beach;Palm Bay;Red Bank;Salt Lake City;Santa Fe;Sioux Falls
Baton Rouge;Round Rock;Green Bay""".replace("\n", ";").split(";")
STATES = dict(
    pair.split("=")
    for pair in """AL=Alabama;AZ=Arizona;CA=California;CO=Colorado;CT=Connecticut;FL=Florida
GA=Georgia;IA=Iowa;ID=Idaho;IL=Illinois;IN=Indiana;KS=Kansas;KY=Kentucky;MA=Massachusetts
MD=Maryland;ME=Maine;MI=Michigan;MN=Minnesota;MO=Missouri;MT=Montana;NC=North Carolina;NE=Nebraska
NJ=New Jersey;NV=Nevada;NY=New York;OH=Ohio;OK=Oklahoma;OR=Oregon;PA=Pennsylvania;TN=Tennessee
TX=Texas;UT=Utah;VA=Virginia;VT=Vermont;WA=Washington;WI=Wisconsin
WY=Wyoming""".replace("\n", ";").split(";")
)
STREET_TYPES = {
    "Street": "st", "Avenue": "ave", "Road": "rd", "Lane": "ln", "Drive": "dr", "Court": "ct",
    "Boulevard": "blvd", "Place": "pl", "Terrace": "ter", "Highway": "hwy",
}  # fmt: skip
DIRECTIONS = {"North": "n", "South": "s", "East": "e", "West": "w"}
BRANDS = """Apex Atlas Beacon Bluebird Bolt Cobalt Comet Condor Copper Crown Delta Eagle Echo
Ember Falcon Fox Galaxy Granite Halo Harbor Horizon Iron Ivory Jade Jupiter Kestrel Lark Lotus
Lunar Acme Magnet Mercury Nova Nimbus Onyx Orbit Orchid Otter Pearl Phoenix Pioneer Quartz Raven
Ridge Rocket Saturn Silver Sparrow Summit Tiger Titan Tulip Union Vertex Violet Willow Wolf
Zenith""".split()
TRADES = {
    "Manufacturing": "Mfg", "International": "Intl", "Brothers": "Bros", "Engineering": "Eng",
    "Services": "Svcs", "Technologies": "Tech", "Laboratories": "Labs", "Associates": "Assoc",
    "Tools": "Tools", "Foods": "Foods", "Motors": "Motors", "Textiles": "Textiles",
    "Bakery": "Bakery", "Paper": "Paper", "Glass": "Glass", "Shipping": "Shipping",
}  # fmt: skip
LEGAL = {"Incorporated": "Inc", "Corporation": "Corp", "Limited": "Ltd", "Company": "Co"}
MONTHS = """January February March April May June July August September October November
December""".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
UNITS = {  # symbol: (kind, power of ten in the kind's base unit, spelled-out name)
    "t": ("mass", 6, "tonnes"), "kg": ("mass", 3, "kilograms"), "g": ("mass", 0, "grams"),
    "mg": ("mass", -3, "milligrams"), "km": ("length", 3, "kilometres"),
    "m": ("length", 0, "metres"), "cm": ("length", -2, "centimetres"),
    "mm": ("length", -3, "millimetres"), "l": ("volume", 0, "litres"),
    "dl": ("volume", -1, "decilitres"), "cl": ("volume", -2, "centilitres"),
    "ml": ("volume", -3, "millilitres"),
}  # fmt: skip
PREFACES = {
    "date": "Write this date as YYYY-MM-DD.\n",
    "name": "Tidy this person's name.\n",
    "unit": "Convert this quantity.\n",
    "address": "Tidy this postal address.\n",
    "match": "Do both records mean the same one?\n",
}
ANSWER_LIMIT = {"date": 16, "name": 24, "unit": 16, "address": 40, "match": 4}


@dataclass(frozen=True)
class Example:
    """One prompt with its answer; `record` is the raw input, by which held-out rows are kept out"""

    task: str
    record: str
    prompt: str
    expected: str


Rng = random.Random
Drawn = tuple[str, str, str]  # record, the record laid out as the prompt's body, answer


def recased(rng: Rng, text: str) -> str:
    return rng.choice((text, text.upper(), text.lower(), text.lower()))


def ordinal(day: int) -> str:
    ending = "th" if 10 < day < 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{ending}"


def draw_date(rng: Rng) -> Drawn:
    day = date(1950, 1, 1) + timedelta(days=rng.randrange(36_524))
    long, short = MONTHS[day.month - 1], MONTHS[day.month - 1][:3]
    month = rng.choice((long, short))
    weekday = rng.choice((DAYS[day.weekday()], DAYS[day.weekday()][:3]))
    d, m, y = day.day, day.month, day.year
    styles = (
        f"{month} {d}, {y}", f"{d} {month} {y}", f"{ordinal(d)} of {long}, {y}",
        f"{long} {ordinal(d)}, {y}", f"{weekday}, {d} {month} {y}", f"{weekday} {month} {d} {y}",
        f"{d:02}.{m:02}.{y}", f"{d}.{m}.{y}", f"{m:02}/{d:02}/{y}", f"{m}/{d}/{y}",
        f"{y}/{m}/{d}", f"{y}.{m:02}.{d:02}", f"{y}{m:02}{d:02}", f"{y} {short} {d:02}",
        f"{d:02}-{short}-{y}", f"{short} {d} '{y % 100:02}", f"{d}-{short}-{y % 100:02}",
    )  # fmt: skip
    record = recased(rng, rng.choice(styles))
    return record, f"Date: {record}\nISO:", day.isoformat()


def made_up(rng: Rng) -> str:
    """A surname-like word that is on no list, so that spelling is copied and not only recalled."""
    starts, vowels = "b d f g h k l m n p r s t v w br ch kr st tr".split(), "a e i o u".split()
    ends = "n r s l nd rt sk ver man ton ler".split()
    count = rng.choice((1, 1, 2))
    body = "".join(rng.choice(starts) + rng.choice(vowels) for _ in range(count))
    return (body + rng.choice(ends)).capitalize()


def surname(rng: Rng) -> str:
    if rng.random() < 0.15:
        return made_up(rng)
    if rng.random() < 0.08:
        return f"{rng.choice(LAST)}-{rng.choice(LAST)}"
    return rng.choice(LAST)


def draw_name(rng: Rng) -> Drawn:
    first, last = rng.choice(FIRST), surname(rng)
    kind = rng.random()
    initial = rng.choice("ABCDEFGHJKLMNPRSTW")
    middle, given = "", first
    if kind < 0.4:
        middle, given = f" {initial}.", f"{first} {initial}{rng.choice(('', '.'))}"
    elif kind < 0.55:
        middle = " " + rng.choice(FIRST)
        given = first + middle
    ending = rng.choice(("Jr.", "Sr.", "III")) if rng.random() < 0.1 else ""
    tail = rng.choice((ending, ending.rstrip("."))) if ending else ""
    title = rng.choice(("Mr", "Mrs.", "Dr.", "Prof.", "Ms")) if rng.random() < 0.2 else ""
    if rng.random() < 0.5:
        parts = [f"{recased(rng, last)},", title, recased(rng, given), tail]
    else:
        parts = [title, recased(rng, given), recased(rng, last), tail]
    record = " ".join(part for part in parts if part)
    if rng.random() < 0.3:
        record = recased(rng, record)
    answer = f"{first}{middle} {last}" + (f" {ending}" if ending else "")
    return record, f"Name: {record}\nClean:", answer


def plain(value: Decimal) -> str:
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def draw_hours(rng: Rng) -> Drawn:
    count = rng.randrange(1, 97)
    word, value, unit = rng.choice((("hours", count / 2, "min"), ("minutes", count, "s")))
    shown = rng.choice((word, word.upper(), {"hours": "h", "minutes": "min"}[word]))
    record = f"{value:g}{rng.choice((' ', ' ', ''))}{shown}"
    return record, f"Quantity: {record}\nIn {unit}:", f"{value * 60:g} {unit}"


def draw_unit(rng: Rng) -> Drawn:
    if rng.random() < 0.06:
        return draw_hours(rng)
    source, (kind, power, name) = rng.choice(list(UNITS.items()))
    near = [u for u, (k, p, _) in UNITS.items() if k == kind and abs(p - power) <= 3]
    target = rng.choice(near)
    digits = rng.randrange(1, 10 ** rng.choice((1, 2, 3, 3, 4))) * rng.choice((1, 1, 10))
    number = Decimal(digits).scaleb(-rng.choice((0, 0, 1, 2)))
    shown = f"{number:,f}" if rng.random() < 0.6 else f"{number:f}"
    label = rng.choice((source, source, name, name.capitalize(), name.upper()))
    record = f"{shown}{' ' if len(label) > 2 else rng.choice((' ', ' ', ''))}{label}"
    answer = f"{plain(number.scaleb(power - UNITS[target][1]))} {target}"
    return f"{record} > {target}", f"Quantity: {record}\nIn {target}:", answer


def draw_address(rng: Rng) -> Drawn:
    number = str(rng.randrange(1, 10 ** rng.choice((1, 2, 3, 4))))
    street = made_up(rng) if rng.random() < 0.15 else rng.choice(STREET)
    direction = rng.choice(list(DIRECTIONS)) if rng.random() < 0.2 else ""
    kind, city, state = rng.choice(list(STREET_TYPES)), rng.choice(CITY), rng.choice(list(STATES))
    postcode, flat = f"{rng.randrange(10_000, 100_000)}", ""
    if rng.random() < 0.2:
        flat = str(rng.randrange(1, 100))
    dot, comma = rng.choice(("", ".")), rng.choice((",", ",", ""))
    heading = rng.choice((direction, DIRECTIONS[direction] + dot)) if direction else ""
    way = rng.choice((kind, STREET_TYPES[kind] + dot, STREET_TYPES[kind] + dot))
    line = " ".join(part for part in (number, heading, street, way) if part)
    unit = f"{comma} {rng.choice(('apt', 'apt.', 'apartment', '#'))} {flat}" if flat else ""
    place = rng.choice((state, state, state, STATES[state]))
    text = f"{line}{unit}{comma} {city}{rng.choice((',', ''))} {place} {postcode}"
    record = recased(rng, text)
    line = " ".join(part for part in (number, direction, street, kind) if part)
    answer = f"{line}{f', Apt {flat}' if flat else ''}, {city}, {state} {postcode}"
    return record, f"Address: {record}\nClean:", answer


def less_shouted(rng: Rng, text: str) -> str:
    return rng.choice((text, text, text.lower(), text.lower(), recased(rng, text)))


def firm_text(rng: Rng, brand: str, trade: str, legal: str, city: str = "") -> str:
    shown_trade = rng.choice((trade, TRADES[trade]))
    ending = rng.choice((legal, LEGAL[legal] + rng.choice(("", ".")), ""))
    name = " ".join(part for part in (brand, shown_trade, ending) if part)
    whole = rng.choice((f"{name}, {city}", f"{name} ({city})", f"{city}: {name}"))
    return less_shouted(rng, whole if city else name)


def person_text(rng: Rng, first: str, last: str, city: str = "") -> str:
    names = (f"{first} {last}", f"{last}, {first}", f"{first[0]}. {last}", f"{last}, {first[0]}.")
    return less_shouted(rng, rng.choice(names) + (f", {city}" if city else ""))


def other(rng: Rng, options: list[str], word: str) -> str:
    """A different word; for a first name another initial too, so the answer is never in doubt."""
    span = 1 if options is FIRST else None
    return rng.choice([option for option in options if option[:span] != word[:span]])


def draw_match(rng: Rng) -> Drawn:
    firm, placed = rng.random() < 0.65, rng.random() < 0.6
    pools = [BRANDS, list(TRADES), list(LEGAL)] if firm else [FIRST, LAST]
    telling = [0, 0, 1] if firm else [0, 1, 1]
    if placed:
        telling.append(len(pools))
        pools.append(CITY)
    write: Callable[..., str] = firm_text if firm else person_text
    left = [rng.choice(pool) for pool in pools]
    right, same = list(left), rng.random() < 0.5
    for place in set() if same else set(rng.choices(telling, k=rng.choice((1, 3)))):
        right[place] = other(rng, pools[place], left[place])
    one, two = write(rng, *left), write(rng, *right)
    return f"{one} | {two}", f"A: {one}\nB: {two}\nSame:", "yes" if same else "no"


DRAWS: dict[str, Callable[[Rng], Drawn]] = {
    "date": draw_date, "name": draw_name, "unit": draw_unit,
    "address": draw_address, "match": draw_match,
}  # fmt: skip
TASKS = tuple(DRAWS)


def draw(rng: Rng, task: str) -> Example:
    record, body, expected = DRAWS[task](rng)
    preface = PREFACES[task] if rng.random() < 0.25 else ""
    return Example(task, record, preface + body, expected)


def held_out() -> list[Example]:
    """The held-out examples: as many of each task, all records distinct, in a fixed shuffle."""
    rng, seen, rows = random.Random(HELD_OUT_SEED), set[str](), list[Example]()
    for task in TASKS:
        kept = 0
        while kept < HELD_OUT_PER_TASK:
            example = draw(rng, task)
            if example.record not in seen:
                seen.add(example.record)
                rows.append(example)
                kept += 1
    rng.shuffle(rows)
    return rows


def training_stream(seed: int, weights: tuple[float, ...] | None = None) -> Iterator[Example]:
    """Training examples without end; none has the record of a held-out example."""
    rng, excluded = random.Random(seed), {example.record for example in held_out()}
    while True:
        example = draw(rng, rng.choices(TASKS, weights)[0])
        if example.record not in excluded:
            yield example
