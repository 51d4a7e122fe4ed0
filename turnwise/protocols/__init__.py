"""The contracts between packages. Any class with the right methods implements one; nothing here imports a
heavy library. `docs/design/protocols.md` shows how each contract fits the systems that it is for."""

from turnwise.protocols.cluster import (
    Cluster as Cluster,
    Pending as Pending,
    RankCalls as RankCalls,
    Route as Route,
    Workers as Workers,
)
from turnwise.protocols.episodes import (
    AgentLoop as AgentLoop,
    Conversation as Conversation,
    Env as Env,
    EpisodeObserver as EpisodeObserver,
    HasExpert as HasExpert,
    HasRandomAction as HasRandomAction,
    HasStateKey as HasStateKey,
    HearsCalls as HearsCalls,
    HearsUsers as HearsUsers,
    MakeEnv as MakeEnv,
    OpenConversation as OpenConversation,
    PlaysInPlaces as PlaysInPlaces,
    RemoteEnv as RemoteEnv,
    Reward as Reward,
    RewardResult as RewardResult,
    SilentObserver as SilentObserver,
    TurnPlace as TurnPlace,
    WaitsForPlace as WaitsForPlace,
)
from turnwise.protocols.servers import (
    InferenceServer as InferenceServer,
    PolicyServer as PolicyServer,
    ServerFactory as ServerFactory,
    Suspension as Suspension,
)
from turnwise.protocols.tools import (
    ChecksRows as ChecksRows,
    Interaction as Interaction,
    ParsedResponse as ParsedResponse,
    Tool as Tool,
    ToolCall as ToolCall,
    ToolCallParser as ToolCallParser,
)
from turnwise.protocols.tracking import (
    NO_TEXTS as NO_TEXTS,
    StepTexts as StepTexts,
    Tracker as Tracker,
)
from turnwise.protocols.training import (
    WHOLE_STEP as WHOLE_STEP,
    Algorithm as Algorithm,
    Loss as Loss,
    NeedsAdvantages as NeedsAdvantages,
    NeedsWholeStep as NeedsWholeStep,
    Output as Output,
    SavedForm as SavedForm,
    Stateful as Stateful,
    StepPart as StepPart,
    StreamsStep as StreamsStep,
    TrainStrategy as TrainStrategy,
)
from turnwise.runtime.info import MemoryKind as MemoryKind
from turnwise.transfer.contracts import (
    NamedTensors as NamedTensors,
    OnWeightUpdate as OnWeightUpdate,
    SendsWeights as SendsWeights,
    WeightSource as WeightSource,
    WeightTransfer as WeightTransfer,
)
