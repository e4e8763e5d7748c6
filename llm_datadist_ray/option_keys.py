"""Names in the option dictionary that ``LLMDataDist.init`` takes (spec api-config §1.2, §2)."""

from __future__ import annotations

# Both interfaces.
ENABLE_CACHE_MANAGER = "llm.EnableCacheManager"
LISTEN_IP_INFO = "llm.listenIpInfo"
SYNC_KV_TIMEOUT = "llm.SyncKvCacheWaitTime"
DEVICE_ID = "ge.exec.deviceId"
FLOW_GRAPH_MEM_MAX_SIZE = "ge.flowGraphMemMaxSize"

# v2.
ENABLE_REMOTE_CACHE_ACCESSIBLE = "llm.EnableRemoteCacheAccessible"
LOCAL_COMM_RES = "llm.LocalCommRes"
TRANSFER_BACKEND = "llm.TransferBackend"
GLOBAL_RESOURCE_CONFIG = "llm.GlobalResourceConfig"
MEM_POOL_CONFIG = "llm.MemPoolConfig"
HOST_MEM_POOL_CONFIG = "llm.HostMemPoolConfig"
LINK_TOTAL_TIME = "llm.LinkTotalTime"
LINK_RETRY_COUNT = "llm.LinkRetryCount"
RDMA_TRAFFIC_CLASS = "llm.RdmaTrafficClass"
RDMA_SERVICE_LEVEL = "llm.RdmaServiceLevel"

# An environment variable, in seconds: what llm.LinkTotalTime is when it is 0 or absent.
CONNECT_TIMEOUT_VARIABLE = "HCCL_CONNECT_TIMEOUT"

# v1.
MEMORY_UTILIZATION = "llm.MemoryUtilization"
BUF_POOL_CFG = "llm.BufPoolCfg"
ENABLE_SWITCH_ROLE = "llm.EnableSwitchRole"
CLUSTER_INFO = "llm.ClusterInfo"

# Emitted by LLMConfig and read by nobody.
SESSION_DEVICE_ID = "ge.session_device_id"
DEPLOY_RES_PATH = "llm.deployResPath"
OUTPUT_MAX_SIZE = "llm.OutputMaxSize"
