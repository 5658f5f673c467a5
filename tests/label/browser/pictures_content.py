"""What people label in the pictures of docs/label: texts as they come up in real work, all made up."""
# ruff: noqa: E501  texts have the lines that people give them

RENT = """My lease ends on 18 June, but the landlord wants the rent for the whole month. The monthly rent is 1,240. Do I have \
to pay all of it?"""
RENT_LONG = """Usually not. If the lease itself ends on 18 June, rent is owed for the days up to and including that day:

1. 1,240 / 30 days in June = 41.33 per day
2. 41.33 × 18 days = 744.00

Before you pay, check two things:

• The contract. Some say that every month counts as 30 days, some that a begun month is paid in full. Where the law protects \
tenants, the second is often not valid.
• The date on the notice. If it says 30 June, the lease runs until then, and the full month is owed even if you move earlier.

Then write to the landlord, name the amount and how you computed it, and ask for a reply in writing."""
RENT_SHORT = """Yes. Rent is always paid for full months, so you owe 1,240 for June. You could ask the landlord to return the \
part for the days after the 18th, but they do not have to agree.

If you want to be sure, talk to a tenants' association in your city."""

SLEEP = "孩子两岁半，晚上一定要喝奶才肯睡，半夜还要醒一次。想断掉夜奶，有没有不让他太难受的办法？"
SLEEP_A = """可以慢慢来，一般两三周就能断掉：

1. 先把睡前奶往前移。晚饭后、刷牙前喝，喝完再洗澡、讲故事，让“喝奶”和“睡着”分开。
2. 半夜醒来先等一两分钟，再轻拍、说“天还黑着呢”。确实要喝，就给温水。
3. 奶量每三天减 30 毫升左右，减到 60 毫升以下就可以停。

前几晚哭闹是正常的，你陪在旁边就好。如果孩子最近生病、换环境或者体重增长慢，先别断，等稳定了再开始；拿不准时问一下儿科医生。"""
SLEEP_B = (
    """直接断就行，两岁半的孩子不需要夜奶了。第一晚哭一哭，第二晚就好了，不要心软。夜里喝奶会蛀牙，还会影响长高。"""
)

FIREWALL = "Explain to my grandmother what a firewall does. She uses a tablet for video calls."
FIREWALL_ANSWERS = (
    """Think of the doorman in your building. He lets in the people you called, and the post, and he turns away strangers \
who only try the handle. A firewall is that doorman for your tablet. When you call us, it knows that you asked for the call \
and lets our picture through. When somebody you do not know knocks, it keeps the door shut. You do not have to do anything: \
it is always on duty.""",
    """A firewall is a network security system that monitors and controls incoming and outgoing traffic based on \
predetermined rules. It typically establishes a barrier between a trusted network and an untrusted one, such as the internet.""",
    """It keeps the bad things out, Grandma! Nothing to worry about. 😊""",
    """A firewall is like a wall that burns viruses. If a virus comes to the tablet, the firewall burns it before it can do \
harm. That is why the tablet gets warm sometimes during long video calls.""",
)

REMINDER = """Write a short, polite reminder to a colleague. She promised the sales figures for Monday, it is Wednesday, and \
the report goes to the printer tomorrow at noon."""
REMINDER_ANSWER = """Hi Lena,

a quick reminder about the sales figures: the report goes to the printer tomorrow (Thursday) at noon, so I would need them by \
10:00 to build them in.

If they are not final yet, the provisional ones are fine, and I will mark them as such. Just let me know which it will be.

Thanks a lot, and shout if I can help with anything!
Tom"""

POLITE = "把下面这句话改得客气一些，发给客户：\n“你们的资料不全，缺了营业执照，补好了再说。”"
POLITE_ANSWER = (
    "您好！感谢您提交资料。我们核对后发现还缺一份营业执照复印件，麻烦您方便时补充，收到后我们会马上为您办理。"
)

EGGS = "How long do I boil an egg so that the yolk is still soft? I live at 2,400 m."
EGGS_ANSWER = """At 2,400 m water boils at about 92 °C, so eggs need less time than at sea level. For a soft yolk, put the \
egg from the fridge into boiling water for 5 minutes, then into cold water."""
EGGS_FROM = "eggs need less time than at sea level. For a soft yolk, put the egg from the fridge into boiling water for 5 minutes"
EGGS_TO = "eggs need longer than at sea level. For a soft yolk, put the egg from the fridge into boiling water for 7 to 8 minutes"

DEPOSIT = "I moved out three weeks ago and left the flat clean. How do I get my deposit back?"
CHAT_ANSWERS = (
    "First look at the handover protocol: if it lists no damage, the landlord has little reason to keep anything. Write to \
them, name the amount, the account and a date (two weeks is usual), and ask for an itemised list of anything they want to keep.",
    "Deposits are returned automatically after six months, so there is nothing to do yet. Just wait.",
)

INSTRUCTIONS = """Choose the answer that you would rather have got, had you asked.

1. Correct before complete, complete before short.
2. A wrong number or a made-up rule: at most “slightly” better.
3. Both refuse without a reason: both bad.
4. Personal data of real people: flag it (f) and skip.

不确定时请写备注（c）。"""

TOPICS = (
    "the deposit",
    "a broken boiler",
    "noise at night",
    "a rise in rent",
    "subletting",
    "mould",
    "a lost key",
    "the notice period",
)
ASKED = (
    "What can I do about {}?",
    "My landlord says that {} is my problem. Is that so?",
    "Please write two sentences to my landlord about {}.",
    "Who pays for {}?",
    "Can I end the lease because of {}?",
    "How long may the landlord take to answer about {}?",
    "A neighbour complains about {}. What now?",
    "Does the contract have to say something about {}?",
    "Is a phone call about {} enough, or do I have to write?",
    "I have photos about {}. Do they help?",
    "Can I hold back rent because of {}?",
    "Does insurance cover {}?",
)
GOOD = "Write to the landlord about {}, say since when, and name a date two weeks from now. Keep a copy; a call is not enough."
POOR = "There is nothing you can do about {}."
GOOD_SHORT = "Yes, once you have reported {} in writing and two weeks have gone by."
POOR_LONG = """As for {}, there are many things to consider, and every case is different. Laws differ from place to place, and so \
do contracts. It is always best to think about it carefully and to talk to everybody involved before you do anything."""
ROUND_PROMPTS = (
    (
        "The boiler has been broken for a week. May I pay less rent?",
        "You should contact your landlord.",
        "Yes, in most places you may, from the day you reported it. Write down the date, ask for repair within a week, and say that you reduce the rent until then.",
    ),
    (
        "邻居每天晚上十一点以后还在练琴，我该怎么办？",
        "可以报警。",
        "先和邻居当面沟通，说明影响和希望停止的时间；没有改善再请物业调解，并记录时间。仍无效时，可以向社区或公安机关反映。",
    ),
    (
        "Can I sublet one room while I am abroad for a semester?",
        "No.",
        "Often yes, but ask first: most contracts need the landlord's consent, and they may only refuse with a reason. Name the person and the dates in your letter.",
    ),
)
